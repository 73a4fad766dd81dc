"""Colour modes of PNG and JPEG to 8-bit grey or RGB.

- Transparent images are composited on black, the value that padding has. Dropping the alpha channel, as `convert`
  does, would bring back whatever colour an editor left under the transparent pixels.
- 16-bit grey is divided by 257, so that white stays white; files that use only 12 of the 16 bits come out dark.
  16-bit colour is cut to its upper 8 bits.
- Colour to grey is the luma of ITU-R BT.601; grey to RGB repeats the channel.
- CMYK is converted without a profile, with the polarity that the Adobe marker tells.
"""

import numpy as np
from PIL import Image, ImageChops


def to_grey(image: Image.Image) -> Image.Image:
    """Mode `L`, from any mode of a PNG or JPEG file."""
    return _plain(image).convert("L")


def to_rgb(image: Image.Image) -> Image.Image:
    """Mode `RGB`, from any mode of a PNG or JPEG file."""
    return _plain(image).convert("RGB")


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
