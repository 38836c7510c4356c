import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fewshot_mahalanobis.networks import set_encoder
from fewshot_mahalanobis.networks.set_encoder import SetEncoder


@pytest.fixture
def encoder() -> SetEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = SetEncoder()
        for norm in encoder.norms:
            nn.init.uniform_(norm.weight, -1.5, 1.5)  # which turns what a max pool picks around
            nn.init.normal_(norm.bias, 0.0, 0.3)
    return encoder


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def images(n: int, size: int = 40) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


def plain(encoder: SetEncoder, x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: BatchNorm on the statistics of the whole set, layer by layer."""
    x = x.double()
    for conv, norm in zip(encoder.convs, encoder.norms, strict=True):
        x = F.conv2d(x, conv.weight.double(), conv.bias.double(), padding=1)
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
        x = (x - mean) / torch.sqrt(variance + norm.eps)
        x = x * norm.weight.double()[:, None, None] + norm.bias.double()[:, None, None]
        x = F.max_pool2d(torch.relu(x), 2)
    return x.mean(dim=(2, 3)).mean(dim=0)


def test_no_epsilon_of_zero_reaches_batch_norm_which_pytorch_2_11_refuses(encoder, monkeypatch):
    seen, batch_norm = [], F.batch_norm

    def watched(*arguments, eps, **settings):
        seen.append(eps)
        return batch_norm(*arguments, eps=eps, **settings)

    monkeypatch.setattr(F, "batch_norm", watched)
    encoder(images(3))
    assert seen
    assert min(seen) > 0


@pytest.mark.parametrize("batch_size", [None, 1, 3, 7, 20])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("size", [40, 33])
def test_statistics_are_those_of_the_whole_set_whatever_the_chunk(encoder, batch_size, mode, size):
    encoder.train(mode)
    with torch.no_grad():
        z = encoder(images(7, size), batch_size)
        assert z.shape == (64,)
        torch.testing.assert_close(z.double(), plain(encoder, images(7, size)), rtol=1e-4, atol=1e-5)


def test_under_autocast_chunks_encode_as_the_whole_set_does(encoder):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(images(7), 3), encoder(images(7)), rtol=0.02, atol=0.01)


def test_a_set_of_equal_blank_images_has_no_negative_variance(encoder):
    with torch.no_grad():
        blank = torch.zeros(3, 3, 40, 40)
        torch.testing.assert_close(encoder(blank, 2).double(), plain(encoder, blank), rtol=1e-4, atol=1e-5)


def test_chunks_bound_the_memory_of_a_large_set(encoder, set_threads):
    largest = 0
    set_threads(1)  # others are not watched

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple | list) else [result]
            largest = max([largest, *(x.numel() for x in outputs if isinstance(x, torch.Tensor))])
            return result

    support = images(48)
    with torch.no_grad(), Watched():
        encoder(support, 4)
    assert largest == 4 * 64 * 40 * 40  # the unpooled maps of a chunk


@pytest.mark.parametrize(
    ("most", "kept"), [(2**30, 24 * 64 * 20 * 20), (200_000, 24 * 64 * 10 * 10), (0, 24 * 3 * 40 * 40)]
)
def test_no_more_maps_of_a_set_are_alive_than_the_bound_or_the_images_allow(
    encoder, monkeypatch, set_threads, most, kept
):
    set_threads(1)
    alive, largest, pooled = [], 0, set_encoder._pooled

    def watched(*arguments):
        nonlocal largest
        result = pooled(*arguments)
        alive.append(weakref.ref(result[0]))
        largest = max(largest, sum(maps.numel() for maps in (each() for each in alive) if maps is not None))
        return result

    monkeypatch.setattr(set_encoder, "_pooled", watched)
    monkeypatch.setattr(set_encoder, "MAX_KEPT", most)
    with torch.no_grad():
        encoder(images(24), 1)
    assert largest <= kept + 2 * 64 * 20 * 20  # and the maps of the last two batches


def test_the_number_of_threads_changes_no_bit(encoder, set_threads):
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        with torch.no_grad():
            found.append(encoder(images(9)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("batch_size", [None, 2])
def test_order_of_the_support_set_does_not_matter(encoder, batch_size):
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(images(6).flip(0), batch_size), encoder(images(6), batch_size), rtol=1e-5, atol=1e-6
        )


def test_no_state_changes(encoder):
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.train()
    encoder(images(4))
    assert encoder.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_gradients_reach_every_parameter(encoder):
    encoder(images(4)).square().sum().backward()
    # A convolution's bias is removed by the normalisation that follows it, so only its gradient may vanish.
    assert all(
        p.grad.abs().max() > 0
        for name, p in encoder.named_parameters()
        if not name.startswith("convs.") or name.endswith("weight")
    )


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("size", [40, 33])
def test_gradients_are_those_of_the_definition_whatever_the_chunk(encoder, batch_size, size):
    support = images(7, size).requires_grad_()
    inputs = [
        support,
        *(p for name, p in encoder.named_parameters() if name.split(".")[-1] == "weight" or "norms" in name),
    ]
    weights = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((plain(encoder, support) * weights).sum(), inputs)
    found = torch.autograd.grad((encoder(support, batch_size).double() * weights).sum(), inputs)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted.to(ours.dtype), rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_chunks_bound_what_is_held_for_the_gradient(encoder):
    held = {}

    def keep(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        z = encoder(images(24), 4)
    pooled = 24 * 64 * 4 * sum(side**2 for side in (20, 10, 5, 2, 1))
    assert sum(held.values()) < 24 * 3 * 40 * 40 * 4 + 2.5 * pooled  # a layer's pooled maps, normalised or not
    z.sum().backward()


def test_in_bfloat16_no_bit_depends_on_the_order_or_the_chunks(encoder):
    support = images(9).bfloat16().contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = encoder(support)
        assert all(torch.equal(encoder(support.flip(0), size), expected) for size in (1, 2, 4))


def test_images_below_32_pixels_are_refused(encoder):
    with pytest.raises(ValueError, match="at least 32 x 32"):
        encoder(images(2, 31))
