"""Transductive CNAPS: what its task encoder and its head compute, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.gaussians.covariance import CovarianceSettings
from fewshot_mahalanobis.heads import TransductiveHead
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import FixedEpisodes
from fewshot_mahalanobis.research.evaluation import evaluate_source
from tests.checkpoints.models import same_weights


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SimpleCNAPS(task_encoder="transductive", image_size=32).eval()


@pytest.fixture(scope="module")
def images():
    return torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


LABELS = torch.tensor([0, 1, 2, 0, 0])


def naive_logits(x, labels, queries):
    """The refinement of the classes, query by query and class by class."""
    k, n = int(labels.max()) + 1, len(x)
    weights = [[float(labels[i] == c) for c in range(k)] for i in range(n)]
    before = None
    for step in range(5):
        points = x if step == 0 else torch.cat([x, queries])
        of_all = sum(torch.outer(p - points.mean(0), p - points.mean(0)) for p in points) / (len(points) - 1)
        rows = torch.zeros(len(queries), k, dtype=x.dtype)
        for c in range(k):
            w = [row[c] for row in weights]
            mean = sum(w_i * p for w_i, p in zip(w, points)) / sum(w)
            cov = sum(w_i * torch.outer(p - mean, p - mean) for w_i, p in zip(w, points)) / sum(w)
            lam = sum(w) / (sum(w) + 1)
            q = lam * cov + (1 - lam) * of_all + torch.eye(x.shape[1], dtype=x.dtype)
            for i, query in enumerate(queries):
                rows[i, c] = -(query - mean) @ torch.linalg.inv(q) @ (query - mean)
        chosen = rows.argmax(1).tolist()
        if step >= 2 and chosen == before:
            break
        before = chosen
        weights = weights[:n] + torch.softmax(rows, 1).tolist()
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_head_equals_a_plain_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    x, queries = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (5, 7))
    logits = TransductiveHead(CovarianceSettings(), 1.0)(x, LABELS, queries)
    torch.testing.assert_close(logits, naive_logits(x, LABELS, queries), rtol=1e-9, atol=1e-9)


def test_task_representation_is_the_lstm_of_support_and_queries(model, images):
    support, queries = images[:5], images[5:]
    encoder = model.set_encoder
    with torch.no_grad():
        encodings = encoder.encodings(support)
        means = torch.stack([encodings[k == LABELS].mean(0) for k in range(3)])
        _, state = encoder.lstm(means.mean(0)[None])
        expected = encoder.lstm(encoder.encodings(queries).mean(0)[None], state)[0][0]
        z = model.task_representation(support, support_labels=LABELS, query_images=queries)
    torch.testing.assert_close(z, expected)


def test_adapting_without_queries_takes_the_support_set_for_them(model, images):
    alone = model.adapt(images[:5], LABELS)
    stated = model.adapt(images[:5], LABELS, query_images=images[:5])
    assert torch.equal(alone.fitted_head.support.adapted, stated.fitted_head.support.adapted)
    assert not torch.equal(
        alone.fitted_head.support.adapted,
        model.adapt(images[:5], LABELS, query_images=images[5:]).fitted_head.support.adapted,
    )


def test_every_trained_parameter_has_a_gradient(model, images):
    model(images[:5], LABELS, images[5:]).logsumexp(1).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained
    model.zero_grad()


def test_checkpoint_comes_back_and_old_settings_lack_the_key(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert same_weights(loaded, model)
    assert loaded.is_transductive
    assert "task_encoder" not in SimpleCNAPS().config


def test_evaluation_gives_the_model_the_queries(model):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    source = ImageSource("drawn", pixels, np.repeat(np.arange(4), 5), tuple("abcd"))
    (found,) = evaluate_source(model, source, way=3, shot=2, queries=3, episodes=3, precision="float32").values()
    episodes = FixedEpisodes(source, 3, 2, 3, seed=0, seed_by_name=False)
    for index, accuracy in enumerate(found):
        episode = episodes.draw(index)
        support, queries = source.network_input(episode.support), source.network_input(episode.query)
        with torch.no_grad():
            logits = model(support, torch.from_numpy(episode.support_labels), queries)
        assert accuracy == (logits.argmax(1).numpy() == episode.query_labels).mean()


def test_support_labels_are_asked_for(model, images):
    with pytest.raises(ValueError, match="support_labels"):
        model.film_parameters(images)


@pytest.mark.parametrize("wrong", [{"adaptation": "none"}, {"head": "linear"}, {"beta": "auto"}])
def test_settings_without_a_transductive_form_are_refused(wrong):
    with pytest.raises(ValueError, match="transductive"):
        SimpleCNAPS(task_encoder="transductive", **wrong)


def test_unknown_task_encoder_is_refused():
    with pytest.raises(ValueError, match="task_encoder must be one of"):
        SimpleCNAPS(task_encoder="lstm")
