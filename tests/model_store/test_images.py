"""An image is resized as torchvision.transforms does it in training, whatever its shape and that of the input."""

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from torchvision.transforms import v2 as transforms

from acclimate_store import InputSpec, Resize
from acclimate_store.images import resized


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (47, 90, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("resize", "steps"),
    [
        ({"size": 32, "crop": 28}, [transforms.Resize(32), transforms.CenterCrop(28)]),
        ({"size": 32, "crop": (20, 30)}, [transforms.Resize(32), transforms.CenterCrop((20, 30))]),
        ({"size": (24, 40)}, [transforms.Resize((24, 40))]),
        ({"size": (24, 40), "crop": (20, 30)}, [transforms.Resize((24, 40)), transforms.CenterCrop((20, 30))]),
        ({"size": 24}, [transforms.Resize((24, 24))]),
    ],
)
def test_resizing_is_that_of_torchvision(
    resize: dict[str, int | tuple[int, int]], steps: list[transforms.Transform], photo: Image.Image
) -> None:
    rule = Resize(interpolation="bilinear", antialias=True, **resize)  # type: ignore[arg-type]
    expected = np.asarray(transforms.Compose(steps)(photo))
    np.testing.assert_array_equal(resized(photo, rule), expected)
    assert rule.result == expected.shape[:2]


def test_a_resize_rule_must_yield_the_size_of_the_input() -> None:
    rule = Resize(size=(24, 40), interpolation="bilinear", antialias=True)
    with pytest.raises(ValidationError, match="resize yields 24x40, but the input is 40x24"):
        InputSpec(channels=1, height=40, width=24, mean=(0.0,), std=(1.0,), resize=rule)


@pytest.mark.parametrize(("size", "crop"), [(32, 33), (32, (20, 33)), ((24, 40), (25, 30)), ((24, 40), 30)])
def test_a_crop_must_lie_within_what_is_resized(size: int | tuple[int, int], crop: int | tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="must not be larger than size"):
        Resize(size=size, interpolation="bilinear", antialias=True, crop=crop)
