import copy

import pytest
import torch

from fewshot_mahalanobis import EuclideanHead, SimpleCNAPS
from fewshot_mahalanobis.networks.simple_cnaps import film_parameters
from fewshot_mahalanobis.networks.task import AdaptedTask
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from tests.tiny import task_representation

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

VARIANTS = [
    {},
    {"adaptation": "auto-regressive"},
    {"adaptation": "none"},
    {"head": "euclidean"},
    {"head": "manhattan"},
    {"head": "cosine"},
    {"head": "dot_product"},
    {"head": "linear"},
    {"task_covariance": False},
    {"projection": True},
    {"scale": 0.5, "beta": 0.3, "one_shot_covariance": "published"},
]


def model_with(**config) -> SimpleCNAPS:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32, **config)
        for name, parameter in model.named_parameters():
            if ".scales." in name:
                torch.nn.init.normal_(parameter, 0.0, 0.1)  # so that adaptation shows
    return model.eval()


def episode(shots=(2, 1, 3), queries=4, size=32):
    generator = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.arange(len(shots)), torch.tensor(shots))
    support = torch.rand(len(labels), 3, size, size, generator=generator) * 2 - 1
    return support, labels, torch.rand(queries, 3, size, size, generator=generator) * 2 - 1


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return model_with()


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_every_variant_of_the_paper_is_a_setting_and_adapting_equals_the_forward_pass(config):
    model = model_with(**config)
    support, labels, query = episode()
    with torch.no_grad():
        expected = model(support, labels, query)
    assert expected.shape == (4, 3)
    task = model.adapt(support, labels)
    torch.testing.assert_close(task.logits(query), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert (task.network.film is None) == (config.get("adaptation") == "none")


def test_forward_and_adapt_leave_every_module_s_state_untouched(model):
    model = copy.deepcopy(model).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    support, labels, query = episode()
    model(support, labels, query)
    model.adapt(support, labels).logits(query)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_backbone_stays_frozen_and_in_inference_mode_when_training():
    model = model_with().train()
    assert not any(module.training for module in model.feature_extractor.modules())
    assert not any(p.requires_grad for p in model.feature_extractor.parameters())
    assert all(p.requires_grad for p in model.film_generator.parameters())


@pytest.mark.parametrize("adaptation", ["film", "auto-regressive"])
def test_gradients_reach_set_encoder_generator_and_scales(adaptation):
    model = model_with(adaptation=adaptation).train()
    support, labels, query = episode()
    torch.nn.functional.cross_entropy(model(support, labels, query), torch.tensor([0, 1, 2, 0])).backward()
    assert model.set_encoder.convs[0].weight.grad.abs().max() > 0
    for name, parameter in model.film_generator.named_parameters():
        assert parameter.grad is not None, name
        if ".scales." in name:
            assert parameter.grad.abs().max() > 0, name
    assert model.feature_extractor.conv1.weight.grad is None


def test_penalty_is_the_sum_of_squares_of_the_scales(model):
    scales = [p for layer in model.film_generator.layers for block in layer.scales for p in block.values()]
    assert len(scales) == 4 * 2 * 4
    expected = sum(float(p.detach().double().square().sum()) for p in scales)
    assert float(model.film_generator.penalty().detach()) == pytest.approx(expected, rel=1e-5)


def test_a_fresh_generator_leaves_the_network_nearly_as_it_is():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SimpleCNAPS(image_size=32)
    with torch.no_grad():
        film = film_parameters(model, episode()[0])
    assert {name: len(gamma) for name, (gamma, _) in film.items()} == model.feature_extractor.film_positions
    for gamma, beta in film.values():
        assert (gamma - 1).abs().max() < 0.05
        assert beta.abs().max() < 0.05


@pytest.mark.parametrize("adaptation", ["film", "auto-regressive"])
def test_results_do_not_depend_on_batch_size_support_order_or_query_company(adaptation):
    model = model_with(adaptation=adaptation)
    support, labels, query = episode(shots=(3, 2, 4), queries=5)
    expected = model.adapt(support, labels).logits(query)
    close = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
    torch.testing.assert_close(
        model.adapt(support, labels, batch_size=2).logits(query, batch_size=3), expected, **close
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.adapt(support[order], labels[order]).logits(query), expected, **close)
    alone = torch.cat([model.adapt(support, labels).logits(one[None]) for one in query])
    torch.testing.assert_close(alone, expected, **close)


def test_results_do_not_depend_on_the_number_of_threads(model):
    support, labels, query = episode(queries=8)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(model.adapt(support, labels).logits(query))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5 * float(results[0].abs().max()))


def test_a_second_head_on_the_adapted_network_leaves_the_first_task_alone(model):
    support, labels, query = episode()
    task = model.adapt(support, labels)
    before = task.logits(query)
    more = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)) * 2 - 1
    features = Features.joined([task.fitted_head.support, Features(task.features(more))])
    wider = FittedHead.fit(task.fitted_head.head, features, torch.cat([labels, torch.tensor([3, 3])]))
    assert AdaptedTask(task.network, wider).logits(query).shape == (4, 4)
    assert torch.equal(task.logits(query), before)


def test_a_model_at_another_size_shares_the_weights_and_nothing_else(model):
    support, labels, query = episode()
    before, larger = model.adapt(support, labels).logits(query), model.at_size(48)
    pairs = zip(model.state_dict().values(), larger.state_dict().values(), strict=True)
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)
    assert torch.equal(larger.adapt(support, labels).logits(query), before)
    assert (model.image_size, model.config["image_size"]) == (32, 32)
    assert (larger.image_size, larger.config["image_size"]) == (48, 48)
    larger.head = EuclideanHead()
    larger.double()
    assert torch.equal(model.adapt(support, labels).logits(query), before)


def test_another_head_and_no_adaptation_can_be_asked_for(model):
    support, labels, query = episode()
    task = model.adapt(support, labels, head=EuclideanHead(), adapt=False)
    with torch.no_grad():
        features = model.feature_extractor(support)
        means = torch.stack([features[labels == k].mean(0) for k in range(3)])
        expected = -(torch.cdist(model.feature_extractor(query), means) ** 2)
    torch.testing.assert_close(task.logits(query), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_bfloat16_features_are_close_to_float32(model):
    support, labels, query = episode()
    exact = model.adapt(support, labels)
    rough = model.adapt(support, labels, dtype=torch.bfloat16)
    assert rough.fitted_head.support.adapted.dtype == torch.float32
    error = (rough.features(query) - exact.features(query)).norm() / exact.features(query).norm()
    assert error < 0.02


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"adaptation": "fim"}, "adaptation must be one of"),
        ({"head": "l3"}, "head must be one of"),
        ({"image_size": 16}, "image_size must be a whole number from 32"),
        ({"beta": 0.0}, "beta"),
        ({"one_shot_covariance": "one"}, "one_shot_covariance"),
    ],
)
def test_wrong_settings_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        SimpleCNAPS(**config)


def test_wrong_episodes_are_named(model):
    support, labels, _ = episode()
    with pytest.raises(ValueError, match="shape"):
        model.adapt(support[0], labels)
    with pytest.raises(ValueError, match="6 support images"):
        model.adapt(support, labels[:-1])
    with pytest.raises(ValueError, match="class 1"):
        model.adapt(support, labels * 2)


def test_the_task_representation_reads_the_frozen_features():
    torch.manual_seed(0)
    model = SimpleCNAPS(frozen_features=True).eval()
    support = torch.rand(6, 3, 84, 84) * 2 - 1
    with torch.no_grad():
        alone = model.set_encoder(support)
        torch.testing.assert_close(task_representation(model, support), alone, rtol=0, atol=0)  # before training
        torch.nn.init.normal_(model.feature_encoder.weight, std=0.1)
        features = model.feature_extractor(support)
        statistics = torch.cat([features.mean(0), features.std(0, correction=0)])
        wanted = alone + model.feature_encoder.weight @ statistics
        torch.testing.assert_close(task_representation(model, support), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(task_representation(model, support, 2), wanted, rtol=1e-4, atol=1e-5)


def test_frozen_features_need_adaptation():
    with pytest.raises(ValueError, match="frozen_features"):
        SimpleCNAPS(frozen_features=True, adaptation="none")


def test_frozen_features_are_kept_in_a_checkpoint(tmp_path):
    model = SimpleCNAPS(frozen_features=True).eval()
    model.save_pretrained(tmp_path)
    again = SimpleCNAPS.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again.feature_encoder.weight, model.feature_encoder.weight)
