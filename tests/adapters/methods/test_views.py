import pytest
import torch
from torch import nn

from acclimate_adapters import InputError
from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.views import PADDING, views


def all_crops(x: torch.Tensor) -> dict[bytes, tuple[int, int, bool]]:
    """Every view there can be, by its bytes: the top and left corner in the padded image, and whether mirrored."""
    height, width = x.shape[1:]
    padded = nn.functional.pad(x[None], (PADDING,) * 4, mode="replicate")[0]
    crops = {}
    for top in range(2 * PADDING + 1):
        for left in range(2 * PADDING + 1):
            crop = padded[:, top : top + height, left : left + width]
            crops[crop.numpy().tobytes()] = (top, left, False)
            crops[crop.flip(2).contiguous().numpy().tobytes()] = (top, left, True)
    return crops


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(3, 9, 12, generator=torch.Generator().manual_seed(0))


def test_every_view_is_a_crop_of_the_edge_padded_image_or_its_mirror_image(image: torch.Tensor) -> None:
    crops = all_crops(image)
    assert len(crops) == 162
    drawn = [crops[view.numpy().tobytes()] for view in views(image, 3000, keyed_generator(0, 0, 0)).contiguous()]
    assert set(drawn) == set(crops.values())
    assert 0.45 < sum(mirrored for _, _, mirrored in drawn) / len(drawn) < 0.55


def test_views_are_shaped_like_the_image(image: torch.Tensor) -> None:
    result = views(image.double(), 5, keyed_generator(0, 0, 0))
    assert result.shape == (5, 3, 9, 12)
    assert result.dtype == torch.float64


def test_an_image_of_one_pixel_has_views() -> None:
    assert torch.equal(views(torch.ones(1, 1, 1), 4, keyed_generator(0, 0, 0)), torch.ones(4, 1, 1, 1))


def test_equal_keys_give_equal_views_and_other_keys_give_others(image: torch.Tensor) -> None:
    first = views(image, 8, keyed_generator(1, 2, 3))
    assert torch.equal(first, views(image, 8, keyed_generator(1, 2, 3)))
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1), (1, 23, 3)):
        assert not torch.equal(first, views(image, 8, keyed_generator(*other)))


def test_the_global_generator_is_left_alone(image: torch.Tensor) -> None:
    before = torch.get_rng_state()
    views(image, 8, keyed_generator(0, 0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[7\]"):
        views(torch.ones(7), 2, keyed_generator(0, 0, 0))
