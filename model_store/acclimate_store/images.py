"""From a decoded image of any colour mode and size to the pixels of a network's input.

Serving and measuring go through the same functions, so that a model is judged on what it will be given.

- Transparent images are composited on black, the value that padding has. Dropping the alpha channel, as `convert`
  does, would bring back whatever colour an editor left under the transparent pixels.
- 16-bit grey is divided by 257, so that white stays white; files that use only 12 of the 16 bits come out dark.
  16-bit colour is cut to its upper 8 bits.
- Colour to grey is the luma of ITU-R BT.601; grey to RGB repeats the channel.
- CMYK is converted without a profile, with the polarity that the Adobe marker tells.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageOps

from acclimate_store.manifest import Resize
from acclimate_store.vision import torchvision

MODES: Final[Mapping[int, str]] = {1: "L", 3: "RGB"}
"""Pillow's mode by number of channels. Image files for networks of other numbers are not read."""


def with_channels(image: Image.Image, channels: int) -> Image.Image:
    """The image, of any mode, in 1 channel (grey) or 3 (RGB)."""
    return _plain(image).convert(MODES[channels])


def upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it, by its EXIF orientation."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken metadata does not spoil the pixels: the orientation is unknown, hence as stored
        return image


def resized(image: Image.Image, resize: Resize) -> NDArray[np.uint8]:
    """Pixels uint8 [H, W, C] of an image that is resized, and cropped, by the rule."""
    transforms = torchvision("transforms.v2.functional")
    # Pillow always filters when it shrinks; only the tensor kernels can do without.
    source = image if resize.antialias else transforms.pil_to_tensor(image)
    mode = transforms.InterpolationMode(resize.interpolation)
    result = transforms.resize(source, resize.target, interpolation=mode, antialias=resize.antialias)
    if resize.crop is not None:
        result = transforms.center_crop(result, [*resize.result])
    return pixels(result if resize.antialias else transforms.to_pil_image(result))


def pixels(image: Image.Image) -> NDArray[Any]:
    """Pixels uint8 [H, W, C] of an image as it is."""
    found: NDArray[Any] = np.asarray(image)
    return np.atleast_3d(found)


def _plain(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        return _from_16_bit(image)
    if image.mode == "CMYK":
        return _from_cmyk(image)
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
    return image


def _from_16_bit(image: Image.Image) -> Image.Image:
    wide = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((wide + 128) // 257).astype(np.uint8))


def _from_cmyk(image: Image.Image) -> Image.Image:
    # Pillow inverts every CMYK JPEG, as Adobe's are stored; a file without the marker has the ordinary polarity.
    adobe = "adobe" in image.info
    return (image if adobe else ImageChops.invert(image)).convert("RGB")
