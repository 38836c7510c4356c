import pytest
import torch

from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.resnet import LAYER_WIDTHS, FilmResNet18


@pytest.fixture
def network() -> FilmResNet18:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = FilmResNet18()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.uniform_(module.weight, 0.5, 1.5)
                torch.nn.init.normal_(module.bias, 0.0, 0.3)
                torch.nn.init.normal_(module.running_mean, 0.0, 0.3)
                torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network.eval()


def random_film(seed: int = 0) -> Film:
    generator = torch.Generator().manual_seed(seed)

    def vector(channels: int, offset: float) -> torch.Tensor:
        return offset + 0.3 * torch.randn(channels, generator=generator)

    positions = FilmResNet18().film_positions
    return Film({name: (vector(width, 1.0), vector(width, 0.0)) for name, width in positions.items()})


def images(n: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_84_pixels_keep_41_positions_and_give_512_features(network):
    with torch.no_grad():
        x = network.stem(images(2, 84))
        assert x.shape == (2, 64, 41, 41)
        for index, (channels, side) in enumerate(zip(LAYER_WIDTHS, (41, 21, 11, 6), strict=True)):
            x = network.layer(index, x)
            assert x.shape == (2, channels, side, side)
        assert network(images(2, 84)).shape == (2, 512)


def test_identity_film_changes_nothing(network):
    film = Film.identity(network.film_positions)
    with torch.no_grad():
        torch.testing.assert_close(network(images(2, 32), film), network(images(2, 32)), rtol=1e-6, atol=1e-6)


def test_film_scales_and_shifts_the_output_of_both_batch_norms(network):
    """Against the block written out: gamma * bn(conv) + beta before each nonlinearity or sum."""
    film, x = random_film().within("layers.1.0"), torch.randn(2, 64, 9, 9, generator=torch.Generator().manual_seed(1))
    block = network.layers[1][0]
    with torch.no_grad():
        out = film["bn1"][0][:, None, None] * block.bn1(block.conv1(x)) + film["bn1"][1][:, None, None]
        out = film["bn2"][0][:, None, None] * block.bn2(block.conv2(torch.relu(out))) + film["bn2"][1][:, None, None]
        expected = torch.relu(out + block.downsample(x))
        torch.testing.assert_close(block(x, film), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("film", [None, random_film()], ids=["plain", "adapted"])
def test_folded_network_equals_the_network_with_batch_norm_and_film(network, film):
    with torch.no_grad():
        expected = network(images(3, 48), film)
        folded = network.for_inference(film)
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
        halves, kernels = network.for_inference(film, torch.bfloat16).state_dict(), folded.state_dict()
        assert all(torch.equal(halves[name], kernel.bfloat16()) for name, kernel in kernels.items())
        assert all(half.is_contiguous(memory_format=torch.channels_last) for half in halves.values() if half.ndim == 4)
        torch.testing.assert_close(folded(images(3, 48)), expected, rtol=1e-4, atol=1e-5)


def test_folding_leaves_the_network_alone(network):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.for_inference(random_film())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_film_under_training_mode_still_uses_running_statistics(network):
    film = random_film()
    with torch.no_grad():
        expected = network.layers[0][0](torch.ones(2, 64, 5, 5), film.within("layers.0.0"))
        network.train()
        before = network.layers[0][0].bn1.running_mean.clone()
        got = network.layers[0][0](torch.ones(2, 64, 5, 5), film.within("layers.0.0"))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert torch.equal(network.layers[0][0].bn1.running_mean, before)
