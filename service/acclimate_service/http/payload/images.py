"""Image files to the canonical batch."""

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from acclimate_store import InputSpec, Resize
from acclimate_store.images import MODES, pixels, resized, with_channels

from .limits import PayloadError, PayloadLimits
from .pictures import Picture, Unreadable, read_header


def decode_images(
    files: Sequence[bytes], spec: InputSpec, limits: PayloadLimits
) -> Generator[None, None, NDArray[np.uint8]]:
    """Decode one file per image, one at each step; the format is told by the content, never by a name.

    The EXIF orientation is applied, so that the model sees what a viewer shows. Of an animation the first frame is
    taken. `spec.resize` resizes and crops as torchvision does; without it an image must have the model's size. Colour
    profiles are ignored. `acclimate_store.images` says how other colour modes become the model's channels.

    Returns:
        uint8 [B, C, H, W] in 0..255, C-contiguous.

    Raises:
        PayloadError: `empty_batch`, `too_many_images`, `undecodable_image`, and `wrong_shape` and `too_many_pixels`,
            which the headers decide before anything is decoded.
    """
    limits.check_count(len(files))
    if spec.channels not in MODES:
        detail = f"image files have 1 or 3 channels, the model takes {spec.channels}; send an array"
        raise PayloadError("wrong_shape", detail)
    pictures = []
    for index, data in enumerate(files):
        pictures.append(_opened(data, index))
        yield
    limits.check_pixels([_cost(picture, spec.resize) for picture in pictures])
    for index, picture in enumerate(pictures):
        _check_size(picture, index, spec)
    batch = np.empty((len(files), spec.channels, spec.height, spec.width), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        image = with_channels(_decoded(picture, index), spec.channels)
        fitting = pixels(image) if spec.resize is None else resized(image, spec.resize)
        batch[index] = fitting.transpose(2, 0, 1)
        yield
    return batch


def _opened(data: bytes, index: int) -> Picture:
    try:
        return read_header(data)
    except Unreadable as error:
        raise _undecodable(index, error) from error


def _decoded(picture: Picture, index: int) -> Image.Image:
    try:
        return picture.decode()
    except Unreadable as error:
        raise _undecodable(index, error) from error


def _undecodable(index: int, error: Unreadable) -> PayloadError:
    return PayloadError("undecodable_image", f"image {index} cannot be decoded ({error}); send a complete image file")


def _cost(picture: Picture, resize: Resize | None) -> int:
    """Pixels that the image costs: a long thin one is small in its file and huge once its shorter side is enlarged."""
    shorter, longer = sorted((picture.width, picture.height))
    side = resize.shorter_side if resize is not None else None
    if side is None:
        return shorter * longer
    return max(shorter * longer, side * (side * longer // shorter))


def _check_size(picture: Picture, index: int, spec: InputSpec) -> None:
    if spec.resize is None and (picture.width, picture.height) != (spec.width, spec.height):
        detail = (
            f"image {index} is {picture.width} wide and {picture.height} high; the model takes {spec.width} x "
            f"{spec.height} and does not resize: resize before sending"
        )
        raise PayloadError("wrong_shape", detail)
