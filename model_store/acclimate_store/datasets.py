"""Labelled images of a user, read batch by batch, as the network is to get them.

| DATA | what is read |
|---|---|
| a folder with a folder per class | image files (torchvision's `ImageFolder`); the folders' names are the classes |
| `.npz` | `images` [N, C, H, W], [N, H, W, C] or [N, H, W], uint8 or float32 in 0..1, and integer `labels` [N] |
| idx | `...images-idx3-ubyte` with `...labels-idx1-ubyte` beside it, also `.gz`; or a folder with one such pair |
| Parquet | a file, or a folder of them, with columns `image` and `label`, as the Hugging Face hub stores data sets |
| `datasets` | a folder that Hugging Face's `save_to_disk` wrote, with these columns; of several splits, one |

Image files, and uint8 arrays that have another size than the network, become its input as the service would make it.
"""

import gzip
import io
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image

from acclimate_store.errors import SampleError
from acclimate_store.images import MODES, pixels, resized, upright, with_channels
from acclimate_store.manifest import InputSpec
from acclimate_store.tables import label_names, open_tables, saved_to_disk

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")
"""Of the image files that are read in folders."""
_IMAGES, _LABELS = "images", "labels"


class Batch(NamedTuple):
    """Some labelled images."""

    images: NDArray[Any]  # [B, C, H, W], uint8 in 0..255 or float32
    labels: NDArray[np.int64]  # [B], in 0..K-1
    clients: tuple[str, ...] | None  # whose they are, where a column says so


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """A set of labelled images, never in memory as a whole; see `labelled_images`.

    Args:
        path: where they are.
        rows: how many there are.
        reader: gives them in batches of a size, in the order in which they are stored.
    """

    path: Path
    rows: int
    reader: Callable[[int], Iterator[Batch]]

    def batches(self, size: int) -> Iterator[Batch]:
        """All of them in order, `size` at a time but for the last.

        Raises:
            SampleError: an image cannot be read, or a label is none of the classes.
        """
        return self.reader(size)


def labelled_images(path: Path, spec: InputSpec, classes: Sequence[str], column: str | None = None) -> LabelledImages:
    """Look at labelled images without reading them.

    Args:
        path: of the data; the module says of which kinds.
        spec: the input that they become.
        classes: names of the classes. Data that name theirs are matched by name, others by number.
        column: array or column that says whose an image is, for data that have one.

    Raises:
        SampleError: they cannot be read, or everything that is wrong with them.
    """
    if path.is_dir():
        if any(path.glob("*-images-idx3-ubyte*")):
            return _idx(_only_idx(path), spec, len(classes), column)
        if any(path.rglob("*.parquet")):
            return _columns(sorted(path.rglob("*.parquet")), path, spec, classes, column)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _columns(saved_to_disk(path), path, spec, classes, column)
        return _folder(path, spec, classes, column)
    if "-images-idx3-ubyte" in path.name or "-images.idx3-ubyte" in path.name:
        return _idx(path, spec, len(classes), column)
    if path.suffix == ".parquet":
        return _columns([path], path, spec, classes, column)
    return _npz(path, spec, len(classes), column)


# --- folders ---


def _folder(path: Path, spec: InputSpec, classes: Sequence[str], column: str | None) -> LabelledImages:
    _refuse_column(path, column, "a folder per class names no clients")
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise SampleError(f"{path} holds no folder per class, no idx files and no Parquet files")
    unknown = [folder.name for folder in folders if folder.name not in classes]
    if unknown:
        raise SampleError(
            f"{path} has folders {', '.join(unknown[:5])}, which are no classes of the model; its classes are "
            f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}"
        )
    files = [
        (file, classes.index(folder.name))
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise SampleError(f"the folders of {path} hold no image files ({', '.join(SUFFIXES)})")

    def read(size: int) -> Iterator[Batch]:
        for first in range(0, len(files), size):
            part = files[first : first + size]
            images = np.stack([decoded(file.read_bytes(), str(file), spec) for file, _ in part])
            yield Batch(images, np.array([label for _, label in part], np.int64), None)

    return LabelledImages(path, len(files), read)


def decoded(content: bytes, name: str, spec: InputSpec) -> NDArray[np.uint8]:
    """An encoded image as the network gets it, [C, H, W]."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            found = upright(image)
    except Exception as error:  # Pillow's parsers raise many types
        raise SampleError(f"{name} cannot be decoded: {error}") from error
    return _fitted(found, name, spec)


def _fitted(image: Image.Image, name: str, spec: InputSpec) -> NDArray[np.uint8]:
    if spec.channels not in MODES:
        raise SampleError(f"{name}: image files have 1 or 3 channels, the model takes {spec.channels}; give arrays")
    image = with_channels(image, spec.channels)
    if spec.resize is not None:
        return resized(image, spec.resize).transpose(2, 0, 1)
    if image.size != (spec.width, spec.height):
        raise SampleError(
            f"{name} is {image.width} wide and {image.height} high, the model takes {spec.width} x {spec.height} and "
            "has no rule to resize; create it with --resize"
        )
    return pixels(image).transpose(2, 0, 1)


# --- arrays ---


def _as_input(images: NDArray[Any], path: Path, spec: InputSpec) -> NDArray[Any]:
    """Arrays [B, C, H, W], [B, H, W, C] or [B, H, W] as the network gets them."""
    shape = images.shape[1:]
    if shape == spec.shape:
        return images
    if (*shape, 1) == (*spec.shape[1:], spec.channels):
        return images[:, None]
    if shape == (*spec.shape[1:], spec.channels):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.dtype == np.uint8:
        if len(shape) == 3 and shape[0] in (1, 3):
            images = images.transpose(0, 2, 3, 1)
        squeezed = images[..., 0] if images.ndim == 4 and images.shape[3] == 1 else images
        return np.stack([_fitted(Image.fromarray(each), str(path), spec) for each in squeezed])
    raise SampleError(f"{path}: the model takes images [N, {spec.extent}], these are [N, {', '.join(map(str, shape))}]")


def _has_form(shape: Sequence[int], dtype: np.dtype[Any], spec: InputSpec) -> bool:
    """Whether `_as_input` can take arrays [N, ...] of that shape."""
    row = tuple(shape[1:])
    exact = (spec.shape, spec.shape[1:] if spec.channels == 1 else None, (*spec.shape[1:], spec.channels))
    if row in exact:
        return True
    image = len(row) == 2 or (len(row) == 3 and (row[0] in (1, 3) or row[2] in (1, 3)))
    grey_or_rgb = spec.channels in MODES
    return dtype == np.uint8 and image and grey_or_rgb and (spec.resize is not None or _size(row) == spec.shape[1:])


def _size(row: tuple[int, ...]) -> tuple[int, ...]:
    if len(row) == 2:
        return row
    return row[1:] if row[0] in (1, 3) else row[:2]


def _numbered(labels: NDArray[Any], path: Path, classes: int) -> NDArray[np.int64]:
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise SampleError(
            f"{path}: labels are numbers from 0 to {classes - 1}, these run from {labels.min()} to {labels.max()}"
        )
    return labels.astype(np.int64)


# --- .npz ---


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of an archive that is read row by row."""

    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_rows: bool  # whether rows lie one after the other in the file

    def read(self, rows: int) -> NDArray[Any]:
        shape = rows, *self.shape[1:]
        size = math.prod(shape) * self.dtype.itemsize
        content = self.file.read(size)
        if len(content) < size:
            raise SampleError(f"{self.file.name} ends early")
        return np.frombuffer(content, self.dtype).reshape(shape)


def _npz(path: Path, spec: InputSpec, classes: int, column: str | None) -> LabelledImages:
    with _opened(path) as archive:
        needed = [_IMAGES, _LABELS, *([column] if column else [])]
        absent = [f"array {name} is missing" for name in needed if f"{name}.npy" not in archive.namelist()]
        if absent:
            raise SampleError(f"{path} does not hold labelled images:", absent)
        with _array(archive, _IMAGES) as images, _array(archive, _LABELS) as labels:
            problems = list(_array_problems(images, labels, spec))
            if problems:
                raise SampleError(f"{path} does not hold labelled images of this model:", problems)
            rows = images.shape[0]

    def read(size: int) -> Iterator[Batch]:
        owners = _whole_array(path, column, rows) if column else None
        with _opened(path) as archive, _array(archive, _IMAGES) as images, _array(archive, _LABELS) as labels:
            for first in range(0, rows, size):
                count = min(size, rows - first)
                chosen = None if owners is None else tuple(map(str, owners[first : first + count]))
                pixels = _as_input(images.read(count), path, spec)
                yield Batch(pixels, _numbered(labels.read(count), path, classes), chosen)

    return LabelledImages(path, rows, read)


def _whole_array(path: Path, name: str, rows: int) -> NDArray[Any]:
    with _opened(path) as archive, archive.open(f"{name}.npy") as file:
        found: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    if found.shape != (rows,):
        raise SampleError(f"{path}: {name} needs one entry per image; its shape is {[*found.shape]}")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[ZipFile]:
    try:
        with ZipFile(path) as archive:
            yield archive
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        if isinstance(error, SampleError):
            raise
        raise SampleError(f"{path} cannot be read as an .npz file without pickle: {error}") from error


@contextmanager
def _array(archive: ZipFile, name: str) -> Iterator[_Array]:
    with archive.open(f"{name}.npy") as file:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
        if read_header is None:
            raise SampleError(f"{name} is of an .npy version that holds no plain numbers; use 1.0 or 2.0")
        shape, fortran_order, dtype = read_header(file)
        yield _Array(file, shape, dtype, by_rows=not fortran_order or len(shape) < 2)


def _array_problems(images: _Array, labels: _Array, spec: InputSpec) -> Iterator[str]:
    if images.dtype not in (np.uint8, np.float32):
        yield f"images are uint8 (0..255) or float32 (0..1), not {images.dtype}"
    if not _has_form(images.shape, images.dtype, spec):
        yield f"the model takes images [N, {spec.extent}], these are {[*images.shape]}"
    if not images.by_rows:
        yield "images are in Fortran order: save numpy.ascontiguousarray(images)"
    if labels.dtype.kind not in "iu":
        yield f"labels are integers, not {labels.dtype}"
    if labels.shape != images.shape[:1] or labels.shape == (0,):
        yield f"one label per image is needed, and at least one image; labels are {[*labels.shape]}"


# --- idx ---


def _only_idx(folder: Path) -> Path:
    found = sorted(folder.glob("*-images-idx3-ubyte*"))
    if len(found) > 1:
        raise SampleError(f"{folder} holds several sets; name one: {', '.join(map(str, found))}")
    return found[0]


def _idx(path: Path, spec: InputSpec, classes: int, column: str | None) -> LabelledImages:
    _refuse_column(path, column, "idx files name no clients")
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    rows, *size = _idx_shape(path, 3)
    count = _idx_shape(beside, 1)[0]
    if count != rows:
        raise SampleError(f"{path} holds {rows} images, {beside.name} {count} labels")
    if not _has_form((rows, *size), np.dtype(np.uint8), spec):
        raise SampleError(f"{path}: the model takes images [N, {spec.extent}], these are {[rows, *size]}")

    def read(number: int) -> Iterator[Batch]:
        with _idx_opened(path) as images, _idx_opened(beside) as labels:
            images.read(16)
            labels.read(8)
            for first in range(0, rows, number):
                part = min(number, rows - first)
                content, classes_of = images.read(part * math.prod(size)), labels.read(part)
                if len(classes_of) < part or len(content) < part * math.prod(size):
                    raise SampleError(f"{path} or {beside.name} ends early")
                found = np.frombuffer(content, np.uint8).reshape(part, *size)
                numbers = _numbered(np.frombuffer(classes_of, np.uint8), beside, classes)
                yield Batch(_as_input(found, path, spec), numbers, None)

    return LabelledImages(path, rows, read)


def _idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    with _idx_opened(path) as file:
        header = file.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, 8, dimensions)):
        raise SampleError(f"{path} is no idx file of unsigned bytes in {dimensions} dimensions")
    return struct.unpack(f">{dimensions}I", header[4:])


@contextmanager
def _idx_opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise SampleError(f"{path} cannot be read: {error}") from error


# --- Parquet, and Arrow as `datasets` saves it ---


def _columns(
    files: Sequence[Path], path: Path, spec: InputSpec, classes: Sequence[str], column: str | None
) -> LabelledImages:
    wanted = ["image", "label", *([column] if column else [])]
    tables = open_tables(files, path)
    schema = tables[0].schema
    absent = [name for name in wanted if name not in schema.names]
    if absent:
        raise SampleError(f"{path} has no column {', '.join(absent)}; its columns are {', '.join(schema.names)}")
    names = label_names(schema.metadata or {})
    unknown = [name for name in names or () if name not in classes]
    if unknown:
        raise SampleError(f"{path} has classes {', '.join(unknown[:5])}, which are no classes of the model")

    def read(size: int) -> Iterator[Batch]:
        for table in tables:
            for part in table.batches(size, wanted):
                columns = part.to_pydict()
                images = [decoded(_content(cell, path), f"an image of {path}", spec) for cell in columns["image"]]
                numbers = np.array(columns["label"])
                if names is not None:
                    _numbered(numbers, path, len(names))
                    numbers = np.array([classes.index(names[number]) for number in numbers])
                owners = tuple(map(str, columns[column])) if column else None
                yield Batch(np.stack(images), _numbered(numbers, path, len(classes)), owners)

    return LabelledImages(path, sum(table.rows for table in tables), read)


def _content(cell: Any, path: Path) -> bytes:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise SampleError(f"{path}: images are encoded bytes in the column itself, not {type(cell).__name__}")
    return content


def _refuse_column(path: Path, column: str | None, reason: str) -> None:
    if column is not None:
        raise SampleError(f"{path} has no column {column}: {reason}")
