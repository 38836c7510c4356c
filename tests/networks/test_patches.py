import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot_mahalanobis.networks.patches import patch_moments


def naive(images: Tensor) -> tuple[Tensor, Tensor]:
    """Cut out the patch around every position, and take mean and covariance of them all."""
    padded = F.pad(images.double(), (1, 1, 1, 1))
    height, width = images.shape[2:]
    patches = torch.stack(
        [
            padded[i, :, y : y + 3, x : x + 3].flatten()
            for i in range(len(images))
            for y in range(height)
            for x in range(width)
        ]
    )
    mean = patches.mean(0)
    return mean, (patches - mean).T @ (patches - mean) / len(patches)


@pytest.mark.parametrize("shape", [(3, 3, 12, 12), (2, 3, 7, 11), (1, 1, 5, 6), (4, 2, 2, 8), (1, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_moments_are_those_of_patches_cut_out_one_by_one(shape, dtype):
    images = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 0.5).to(dtype)
    for size in (1, 2, 4):
        for found, wanted in zip(patch_moments(images.split(size)), naive(images), strict=True):
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_a_convolutions_maps_have_the_statistics_that_the_moments_tell():
    generator = torch.Generator().manual_seed(0)
    images, weight = (torch.randn(shape, generator=generator).double() for shape in ((5, 3, 20, 18), (8, 3, 3, 3)))
    maps = F.conv2d(images, weight, padding=1)
    mean, covariance = patch_moments(images.split(2))
    w = weight.flatten(1)
    torch.testing.assert_close(w @ mean, maps.mean(dim=(0, 2, 3)))
    torch.testing.assert_close((w @ covariance @ w.T).diagonal(), maps.var(dim=(0, 2, 3), correction=0))


def test_moments_do_not_depend_on_layout_order_or_chunk_in_float32():
    images = torch.rand(6, 3, 84, 84, generator=torch.Generator().manual_seed(0)) * 2 - 1
    wanted = patch_moments([images])
    others = (images.contiguous(memory_format=torch.channels_last).split(4), images.flip(0).split(1))
    for other in others:
        for found, expected in zip(patch_moments(other), wanted, strict=True):
            assert torch.equal(found.float(), expected.float())
