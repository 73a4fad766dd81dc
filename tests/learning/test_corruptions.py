"""Corruptions are for grey and colour images of any size, grow with their severity and draw nothing of their own."""

import pytest
import torch
from torch import Tensor

from acclimate_learning.clients import FAMILIES_OF
from acclimate_learning.corruptions import FAMILIES, corrupt
from acclimate_learning.errors import LearningError


def picture(channels: int, height: int, width: int) -> Tensor:
    """Patches of several sizes: something that every corruption changes."""
    draw = torch.Generator().manual_seed(1)
    patches = [torch.rand(3, channels, cells, cells, generator=draw) for cells in (3, 5, 9, 17)]
    size = (height, width)
    mixed = torch.stack([torch.nn.functional.interpolate(each, size=size, mode="bilinear") for each in patches])
    return ((0.1 + 0.8 * mixed.mean(0)) * 255).to(torch.uint8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 40, 64)])
def test_each_changes_images_more_with_its_severity(family: str, shape: tuple[int, int, int]) -> None:
    images = picture(*shape)
    before = images.clone()
    changes = []
    for severity in (1, 3, 5):
        changed = corrupt(images, family, severity, torch.Generator().manual_seed(2))
        assert changed.shape == images.shape
        assert changed.dtype == torch.uint8
        changes.append(float((changed.float() - images.float()).abs().mean()))
    assert 0 < 0.8 * changes[0] < changes[1] < changes[2]
    assert changes[0] < 40
    assert torch.equal(images, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_draw_gives_the_same_images(family: str) -> None:
    images = picture(3, 32, 32)
    first, second = (corrupt(images, family, 3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", ["gaussian_blur", "defocus_blur"])
def test_a_blur_is_as_wide_on_a_larger_image(family: str) -> None:
    small = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    small[..., 16:] = 255
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    blurred = [corrupt(x, family, 5, torch.Generator())[0, 0, 8] for x in (small, large)]
    widths = [float(((row > 0) & (row < 255)).sum()) / len(row) for row in blurred]
    assert widths[1] == pytest.approx(widths[0], abs=0.06)


def test_every_corruption_has_a_role_and_those_of_the_judges_have_no_other() -> None:
    learned = {*FAMILIES_OF["teach"], *FAMILIES_OF["tune"]}
    assert learned | {*FAMILIES_OF["judge"]} == FAMILIES.keys()
    assert not learned & {*FAMILIES_OF["judge"]}
    assert {*FAMILIES_OF["teach"]} < {*FAMILIES_OF["tune"]}, "who tunes sees what teaches, on other images, and more"


def test_unknown_ones_are_named() -> None:
    with pytest.raises(LearningError, match="there is no corruption 'snow'; there are gaussian_noise"):
        corrupt(picture(1, 8, 8), "snow", 1, torch.Generator())
    with pytest.raises(LearningError, match="severities are 1 to 5, not 0"):
        corrupt(picture(1, 8, 8), "fog", 0, torch.Generator())
