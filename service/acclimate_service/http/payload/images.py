"""PNG and JPEG files to the canonical batch.

Their colour modes become 8-bit grey or RGB:

- Transparent images are composited on black, the value that padding has. Dropping the alpha channel, as `convert`
  does, would bring back whatever colour an editor left under the transparent pixels.
- 16-bit grey is divided by 257, so that white stays white; files that use only 12 of the 16 bits come out dark.
  16-bit colour is cut to its upper 8 bits.
- Colour to grey is the luma of ITU-R BT.601; grey to RGB repeats the channel.
- CMYK is converted without a profile, with the polarity that the Adobe marker tells.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageOps
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from acclimate_store import InputSpec, Resize

from .limits import PayloadError, PayloadLimits

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANS = 64  # every scan visits every pixel, however few bytes it has; real progressive files have about ten

_MODES = {1: "L", 3: "RGB"}


def decode_images(files: Sequence[bytes], spec: InputSpec, limits: PayloadLimits) -> NDArray[np.uint8]:
    """Decode one file per image; the format is told by the content, never by a name.

    The EXIF orientation is applied, so that the model sees what a viewer shows. Of an animated PNG the first frame is
    taken. `spec.resize` resizes and crops as torchvision does; without it an image must have the model's size. Colour
    profiles are ignored. Other colour modes become the model's channels as said above.

    Returns:
        uint8 [B, C, H, W] in 0..255, C-contiguous.

    Raises:
        PayloadError: `empty_batch`, `too_many_images`, `undecodable_image`, `wrong_shape`, and `too_many_pixels`,
            which the headers decide before anything is decoded.
    """
    limits.check_count(len(files))
    if spec.channels not in _MODES:
        detail = f"PNG and JPEG files have 1 or 3 channels, the model takes {spec.channels}; send an array"
        raise PayloadError("wrong_shape", detail)
    limits.check_pixels([_pixels(_open(data, index), spec.resize) for index, data in enumerate(files)])
    batch = np.empty((len(files), spec.channels, spec.height, spec.width), dtype=np.uint8)
    for index, data in enumerate(files):
        image = _plain(_load(data, index)).convert(_MODES[spec.channels])
        batch[index] = _fit(image, index, spec).transpose(2, 0, 1)
    return batch


def _open(data: bytes, index: int) -> ImageFile:
    """Read the header alone. The plugins are called directly, since `Image.open` has a pixel limit of its own."""
    if not data.startswith((_PNG, _JPEG)):
        found = f"it starts with {data[:4].hex(' ')}" if data else "it is empty"
        raise PayloadError("undecodable_image", f"image {index} is not a PNG or JPEG file: {found}")
    if data.startswith(_JPEG) and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise PayloadError("undecodable_image", f"image {index} is a JPEG of more than {_MAX_SCANS} scans")
    try:
        return (PngImageFile if data.startswith(_PNG) else JpegImageFile)(io.BytesIO(data))
    except Exception as error:  # Pillow's parsers raise many types on hostile input, and all mean the same
        raise _undecodable(index, error) from error


def _load(data: bytes, index: int) -> Image.Image:
    image = _open(data, index)
    try:
        image.load()
    except Exception as error:  # as above
        raise _undecodable(index, error) from error
    return _upright(image)


def _undecodable(index: int, error: Exception) -> PayloadError:
    detail = f"image {index} cannot be decoded ({str(error)[:120]}); send a complete PNG or JPEG file"
    return PayloadError("undecodable_image", detail)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken metadata does not spoil the pixels: the orientation is unknown, hence as stored
        return image


def _pixels(image: Image.Image, resize: Resize | None) -> int:
    """What the image costs: a long thin one is small in its file and huge once its shorter side is enlarged."""
    shorter, longer = sorted(image.size)
    if resize is None or resize.crop is None:
        return shorter * longer
    return max(shorter * longer, resize.size * (resize.size * longer // shorter))


def _fit(image: Image.Image, index: int, spec: InputSpec) -> NDArray[np.uint8]:
    """Bring an image to [H, W, C] of the model."""
    if spec.resize is not None:
        return _resize(image, spec.resize)
    if image.size != (spec.width, spec.height):
        detail = (
            f"image {index} is {image.width} wide and {image.height} high; the model takes {spec.width} x "
            f"{spec.height} and does not resize: resize before sending"
        )
        raise PayloadError("wrong_shape", detail)
    return _channels_last(image)


def _resize(image: Image.Image, resize: Resize) -> NDArray[np.uint8]:
    # Pillow always filters when it shrinks; only the tensor kernels can do without.
    source = image if resize.antialias else transforms.pil_to_tensor(image)
    size = [resize.size, resize.size] if resize.crop is None else [resize.size]
    mode = InterpolationMode(resize.interpolation)
    resized = transforms.resize(source, size, interpolation=mode, antialias=resize.antialias)
    if resize.crop is not None:
        resized = transforms.center_crop(resized, [resize.crop, resize.crop])
    return _channels_last(resized if resize.antialias else transforms.to_pil_image(resized))


def _channels_last(image: Image.Image) -> NDArray[Any]:
    pixels: NDArray[Any] = np.asarray(image)
    return np.atleast_3d(pixels)


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
