import numpy as np
import torch

from fewshot_mahalanobis.images.decode import to_network_range
from fewshot_mahalanobis.research.training.augment import (
    camera_task,
    random_brightness_contrast,
    random_flips,
    random_resized_crops,
    random_turns,
    to_other_domains,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int = 6, size: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (n, size, size, 3), generator=generator(9), dtype=torch.uint8)


def test_network_range_is_minus_one_to_one():
    torch.testing.assert_close(to_network_range(torch.tensor([0, 255], dtype=torch.uint8)), torch.tensor([-1.0, 1.0]))


def test_crops_have_the_size_asked_for_and_follow_from_the_generator():
    crops = random_resized_crops(noise(), 12, 0.3, generator())
    assert crops.shape == (6, 3, 12, 12)
    assert crops.dtype == torch.uint8
    assert torch.equal(crops, random_resized_crops(noise(), 12, 0.3, generator()))
    assert not torch.equal(crops, random_resized_crops(noise(), 12, 0.3, generator(1)))


def test_a_crop_is_a_region_of_its_image():
    """On an image whose pixels hold their coordinates, crops show the region they cover."""
    ramp = torch.arange(64, dtype=torch.uint8)[:, None].expand(64, 64)
    images = torch.stack([ramp, ramp.T, torch.zeros_like(ramp)], dim=-1)[None].repeat(200, 1, 1, 1)
    crops = random_resized_crops(images, 32, 0.25, generator()).float()
    rows, columns = crops[:, 0], crops[:, 1]
    height = rows[:, -1, 0] - rows[:, 0, 0]
    width = columns[:, 0, -1] - columns[:, 0, 0]
    assert (height > 0).all()
    assert (width > 0).all()
    area = height * width / 64**2
    assert area.min() > 0.25 * 0.75  # ends of a resized ramp lie half a pixel inside it
    assert area.max() <= 1
    assert area.std() > 0.1


def test_flips_mirror_whole_images_half_of_the_time():
    images = to_network_range(noise(200, 4)).permute(0, 3, 1, 2)
    flipped = random_flips(images, generator())
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 70 < int(mirrored.sum()) < 130  # 100 +- 4 standard deviations


def test_brightness_and_contrast_stay_in_range_and_act_on_whole_images():
    images = to_network_range(noise()).permute(0, 3, 1, 2) * 0.5
    out = random_brightness_contrast(images, 0.2, generator())
    assert out.min() >= -1
    assert out.max() <= 1
    for before, after in zip(images.flatten(1), out.flatten(1), strict=True):  # one straight line for each image
        line = torch.stack([before, torch.ones_like(before)], dim=1)
        slope_and_shift = torch.linalg.lstsq(line, after[:, None]).solution
        torch.testing.assert_close(line @ slope_and_shift, after[:, None], rtol=0, atol=1e-5)
        assert 0.8 <= float(slope_and_shift[0]) <= 1.2
    assert not torch.allclose(images, out, atol=0.01)


def test_turns_are_told_and_take_their_share_of_the_images():
    images = to_network_range(noise(2000, 4)).permute(0, 3, 1, 2)
    turned, quarters = random_turns(images, 0.6, generator())
    for image, result, quarter in zip(images, turned, quarters.tolist(), strict=True):
        expected = image
        for _ in range(quarter):  # a quarter turn to the left: rows become columns, the last column the first row
            expected = expected.transpose(1, 2).flip(1)
        assert torch.equal(result, expected)
    counts = quarters.bincount(minlength=4)
    assert 2000 * 0.4 - 88 < counts[0] < 2000 * 0.4 + 88  # 4 standard deviations
    assert all(400 - 72 < count < 400 + 72 for count in counts[1:])
    still, none = random_turns(images, 0.0, generator())
    assert torch.equal(still, images)
    assert not none.any()


def test_a_share_of_the_images_loses_detail_and_drawings_are_inverted():
    images = to_network_range(noise(1000, 64)).permute(0, 3, 1, 2)
    moved = to_other_domains(images, 0.3, grey=True, generator=generator())
    same, inverted = ((moved == sign * images).flatten(1).all(1) for sign in (1, -1))
    coarse = ~(same | inverted)
    # Neighbours in noise differ; enlarged from 56 pixels or fewer, they are alike.
    detail = (moved[..., 1:] - moved[..., :-1]).square().mean((1, 2, 3))
    assert detail[coarse].max() < 0.7 * detail[~coarse].min()
    for count, share in ((int(same.sum()), 0.49), (int(inverted.sum()), 0.21), (int(coarse.sum()), 0.3)):
        assert abs(count - 1000 * share) < 4 * (1000 * share * (1 - share)) ** 0.5
    correlation = (moved * images).mean((1, 2, 3))
    assert abs(int((correlation[coarse] < 0).sum()) - 90) < 4 * (90 * 0.91) ** 0.5  # inverted as well
    photographs = to_other_domains(images, 0.3, grey=False, generator=generator())
    assert torch.equal(
        photographs, torch.where(((moved * images).mean((1, 2, 3)) < 0)[:, None, None, None], -moved, moved)
    )
    assert torch.equal(images, to_network_range(noise(1000, 64)).permute(0, 3, 1, 2))


def test_a_camera_gives_pictures_of_the_size_asked_for_each_changed_by_itself():
    picture = torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        images = camera_task(picture.expand(4, -1, -1, -1), 40, rng)
        assert images.shape == (4, 3, 40, 40)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert images.abs().max() <= 1
        assert torch.equal(images, camera_task(picture.expand(4, -1, -1, -1), 40, np.random.default_rng(seed)))
        seen.append(not torch.equal(images[0], images[1]))
    assert all(seen)
