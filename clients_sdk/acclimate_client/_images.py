"""A batch of images to the body that carries it. Nothing here sends; a file is read if its path is given."""

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Layout = Literal["NHWC", "NCHW", "NHW"]

AXES = {"NHWC": 4, "NCHW": 4, "NHW": 3}
TOLERANCE = 1e-3  # how far outside 0..1 the server lets floats lie, for rounding
SIGNATURES = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/bmp": re.compile(rb"BM"),
    "image/tiff": re.compile(rb"II\*\0|MM\0\*"),
}
ORIENTATION = 0x0112  # of EXIF
ACCEPTED = (
    "a batch is one array [B, H, W], [B, H, W, C] or [B, C, H, W], or a list of equally shaped arrays, "
    "or a list of PNG, JPEG, WebP, GIF, BMP or TIFF files given as paths, bytes or PIL images"
)


class ArrayLike(Protocol):
    """Anything NumPy can read as an array: an ndarray, a torch tensor on the CPU, ..."""

    def __array__(self) -> NDArray[Any]:
        """Returns the array."""


@runtime_checkable
class PilImage(Protocol):
    """The part of `PIL.Image.Image` in use, so that Pillow need not be installed to send arrays and files."""

    @property
    def mode(self) -> str:
        """Pixel format."""

    def load(self) -> object:
        """Reads the pixels, if they have not been read."""

    def convert(self, mode: str) -> "PilImage":
        """Returns the image in another pixel format."""

    def getexif(self) -> Any:
        """Returns the metadata, `PIL.Image.Exif`."""

    def save(self, fp: IO[bytes], format: str, **options: Any) -> None:
        """Writes the encoded image."""


EncodedImage = str | Path | bytes | PilImage
Images = ArrayLike | Sequence[ArrayLike | EncodedImage]


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes of a request body and the headers that describe them."""

    content: bytes
    headers: dict[str, str]


def encode(images: Images, layout: Layout | None = None, labels: str | None = None) -> Body:
    """Returns the body for one batch. Equal batches give equal bytes, so a key may be sent again with them.

    Args:
        images: An array or list of arrays, uint8 (0..255) or floating (0..1), sent as a raw tensor; or a list of
            image files (paths, bytes) and PIL images (sent as PNG, pixels and EXIF orientation as they are).
        layout: Order of the axes of arrays; None lets the server take the only one that fits the model.
        labels: JSON list, in ASCII, that goes with the images.

    Raises:
        TypeError: `images` or one of its items is of no accepted type, or the array's dtype is not.
        ValueError: The batch is empty, ragged, out of range or not finite, or `layout` does not fit it.
        OSError: A file cannot be read.
    """
    if layout is not None and layout not in AXES:
        raise ValueError(f"layout is {layout!r}; accepted are {', '.join(AXES)} and None")
    if _is_array(images):
        return _labelled(_tensor(_as_array(images), layout), labels)
    if not isinstance(images, list | tuple):
        raise TypeError(f"images is a {type(images).__name__}; {ACCEPTED}")
    if not images:
        raise ValueError(f"images is empty; {ACCEPTED}")
    if all(_is_array(image) for image in images):
        return _labelled(_tensor(_stack([_as_array(image) for image in images]), layout), labels)
    if layout is not None:
        raise ValueError(f"layout is {layout!r}, but images are encoded files, which state their own; pass None")
    return _form([_encoded(index, image) for index, image in enumerate(images)], labels)


def count(images: Images) -> int:
    """Returns the number of images of a batch that `encode` takes."""
    return len(_as_array(images)) if _is_array(images) else len(cast("Sequence[object]", images))


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, PilImage)


def _as_array(value: object) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # e.g. torch: on a GPU, or requires grad
        raise TypeError(f"{type(value).__name__} cannot be read as a NumPy array: {error}") from error


def _stack(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    first = arrays[0]
    for index, array in enumerate(arrays):
        if array.shape != first.shape:
            raise ValueError(f"image {index} has shape {array.shape} and image 0 {first.shape}; shapes must be equal")
        if array.dtype != first.dtype:
            raise TypeError(f"image {index} is {array.dtype} and image 0 {first.dtype}; dtypes must be equal")
    return np.stack(arrays)


def _tensor(batch: NDArray[Any], layout: Layout | None) -> Body:
    if batch.ndim not in (3, 4):
        hint = "; add the batch axis: images[None]" if batch.ndim == 2 else ""
        raise ValueError(f"the array has shape {batch.shape}{hint}; {ACCEPTED}")
    if layout is not None and AXES[layout] != batch.ndim:
        raise ValueError(f"layout {layout} has {AXES[layout]} axes, but the batch has shape {batch.shape}")
    if batch.size == 0:
        raise ValueError(f"the batch of shape {batch.shape} is empty; at least one image of one pixel is needed")
    values = _values(batch)
    headers = {
        "Content-Type": "application/octet-stream",
        "X-Tensor-Shape": ",".join(map(str, batch.shape)),
        "X-Tensor-Dtype": values.dtype.name,
    }
    layout = layout or ("NHW" if batch.ndim == 3 else None)
    return Body(values.tobytes(), headers | ({"X-Tensor-Layout": layout} if layout else {}))


def _values(batch: NDArray[Any]) -> NDArray[np.uint8] | NDArray[np.float32]:
    if batch.dtype == np.uint8:
        return batch
    if batch.dtype.kind != "f" or batch.dtype.itemsize > 8:
        raise TypeError(f"the array is {batch.dtype}; accepted are uint8 (0..255) and float16/32/64 (0..1)")
    finite = np.isfinite(batch).reshape(len(batch), -1).all(axis=1)
    if not finite.all():
        raise ValueError(f"image {int(finite.argmin())} holds NaN or infinity")
    low, high = float(batch.min()), float(batch.max())
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(f"floats must lie in 0..1, found {low:g}..{high:g}; divide 0..255 by 255, or pass uint8")
    return batch.astype("<f4", copy=False)


def _encoded(index: int, image: object) -> bytes:
    if isinstance(image, PilImage):
        return _png(index, image)
    if isinstance(image, str | Path):
        content = Path(image).read_bytes()
    elif isinstance(image, bytes):
        content = image
    else:
        raise TypeError(f"image {index} is a {type(image).__name__}; {ACCEPTED}")
    if _kind(content) is None:
        name = f" ({image})" if isinstance(image, str | Path) else ""
        raise ValueError(f"image {index}{name} is no PNG, JPEG, WebP, GIF, BMP or TIFF file")
    return content


def _kind(file: bytes) -> str | None:
    return next((kind for kind, signature in SIGNATURES.items() if signature.match(file)), None)


def _png(index: int, image: PilImage) -> bytes:
    buffer = io.BytesIO()
    try:
        image.load()  # first: of some formats Pillow turns the pixels then, and forgets the orientation
        metadata = image.getexif()
        turned = type(metadata)()
        turned[ORIENTATION] = metadata.get(ORIENTATION, 1)
        options = {"exif": turned.tobytes()} if turned[ORIENTATION] in range(2, 9) else {}
        plain = image.convert("I").convert("I;16") if image.mode in ("I;16L", "I;16N") else image
        plain.save(buffer, format="PNG", **options)
    except OSError as error:
        raise ValueError(f"image {index}: {error}; convert it first: image.convert('RGB')") from error
    return buffer.getvalue()


def _labelled(body: Body, labels: str | None) -> Body:
    return body if labels is None else Body(body.content, {**body.headers, "X-Labels": labels})


def _form(files: Sequence[bytes], labels: str | None) -> Body:
    # A random boundary would make each encoding of the same images a different body.
    digest = hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in files)).hexdigest()
    boundary = f"acclimate-{digest[:48]}"
    parts = [_part(boundary, index, file) for index, file in enumerate(files)]
    if labels is not None:
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="labels"\r\nContent-Type: application/json\r\n\r\n'
        )
        parts.append(f"{head}{labels}\r\n".encode())
    content = b"".join([*parts, f"--{boundary}--\r\n".encode()])
    return Body(content, {"Content-Type": f"multipart/form-data; boundary={boundary}"})


def _part(boundary: str, index: int, file: bytes) -> bytes:
    kind = _kind(file) or "application/octet-stream"
    name = f"{index}.{kind.removeprefix('image/')}"
    head = (
        f"--{boundary}\r\n"
        f'Content-Disposition: form-data; name="images"; filename="{name}"\r\n'
        f"Content-Type: {kind}\r\n\r\n"
    )
    return head.encode() + file + b"\r\n"
