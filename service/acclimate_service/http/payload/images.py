"""PNG and JPEG files to the canonical batch."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from acclimate_store import InputSpec, Resize
from acclimate_store.images import MODES, pixels, resized, upright, with_channels

from .limits import PayloadError, PayloadLimits

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANS = 64  # every scan visits every pixel, however few bytes it has; real progressive files have about ten


def decode_images(files: Sequence[bytes], spec: InputSpec, limits: PayloadLimits) -> NDArray[np.uint8]:
    """Decode one file per image; the format is told by the content, never by a name.

    The EXIF orientation is applied, so that the model sees what a viewer shows. Of an animated PNG the first frame is
    taken. `spec.resize` resizes and crops as torchvision does; without it an image must have the model's size. Colour
    profiles are ignored. `acclimate_store.images` says how other colour modes become
    the model's channels.

    Returns:
        uint8 [B, C, H, W] in 0..255, C-contiguous.

    Raises:
        PayloadError: `empty_batch`, `too_many_images`, `undecodable_image`, `wrong_shape`, and `too_many_pixels`,
            which the headers decide before anything is decoded.
    """
    limits.check_count(len(files))
    if spec.channels not in MODES:
        detail = f"PNG and JPEG files have 1 or 3 channels, the model takes {spec.channels}; send an array"
        raise PayloadError("wrong_shape", detail)
    limits.check_pixels([_pixels(_open(data, index), spec.resize) for index, data in enumerate(files)])
    batch = np.empty((len(files), spec.channels, spec.height, spec.width), dtype=np.uint8)
    for index, data in enumerate(files):
        image = with_channels(_load(data, index), spec.channels)
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


def _load(data: bytes, index: int) -> Image:
    image = _open(data, index)
    try:
        image.load()
    except Exception as error:  # as above
        raise _undecodable(index, error) from error
    return upright(image)


def _undecodable(index: int, error: Exception) -> PayloadError:
    detail = f"image {index} cannot be decoded ({str(error)[:120]}); send a complete PNG or JPEG file"
    return PayloadError("undecodable_image", detail)


def _pixels(image: Image, resize: Resize | None) -> int:
    """What the image costs: a long thin one is small in its file and huge once its shorter side is enlarged."""
    shorter, longer = sorted(image.size)
    side = resize.shorter_side if resize is not None else None
    if side is None:
        return shorter * longer
    return max(shorter * longer, side * (side * longer // shorter))


def _fit(image: Image, index: int, spec: InputSpec) -> NDArray[np.uint8]:
    """Bring an image to [H, W, C] of the model."""
    if spec.resize is not None:
        return resized(image, spec.resize)
    if image.size != (spec.width, spec.height):
        detail = (
            f"image {index} is {image.width} wide and {image.height} high; the model takes {spec.width} x "
            f"{spec.height} and does not resize: resize before sending"
        )
        raise PayloadError("wrong_shape", detail)
    return pixels(image)
