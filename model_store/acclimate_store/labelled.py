"""Labelled images in an .npz file, read batch by batch."""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from acclimate_store.errors import SampleError

IMAGES, LABELS = "images", "labels"


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """A file with `images` [N, C, H, W], uint8 or float32 in 0..1, and integer `labels` [N]; see `labelled_images`.

    Neither array is ever in memory as a whole.
    """

    path: Path
    rows: int

    def batches(self, size: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Images [B, C, H, W] and labels [B], in order, B = `size` but for the last.

        Raises:
            SampleError: the file ends early or is damaged.
        """
        with _opened(self.path) as archive, _array(archive, IMAGES) as images, _array(archive, LABELS) as labels:
            for first in range(0, self.rows, size):
                count = min(size, self.rows - first)
                yield images.read(count), labels.read(count).astype(np.int64)


def labelled_images(path: Path, shape: Sequence[int]) -> LabelledImages:
    """Look at a file of labelled images without reading it, and without pickle.

    Args:
        path: of the .npz file.
        shape: C, H and W that the images must have.

    Raises:
        SampleError: it cannot be read, or everything that is wrong with it.
    """
    with _opened(path) as archive:
        absent = [f"array {name} is missing" for name in (IMAGES, LABELS) if f"{name}.npy" not in archive.namelist()]
        if absent:
            raise SampleError(f"{path} does not hold labelled images:", absent)
        with _array(archive, IMAGES) as images, _array(archive, LABELS) as labels:
            problems = list(_problems(images, labels, shape))
            if problems:
                raise SampleError(f"{path} does not hold labelled images of this model:", problems)
            return LabelledImages(path, images.shape[0])


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


def _problems(images: _Array, labels: _Array, shape: Sequence[int]) -> Iterator[str]:
    if images.dtype not in (np.uint8, np.float32):
        yield f"images are uint8 (0..255) or float32 (0..1), not {images.dtype}"
    if images.shape[1:] != tuple(shape):
        wanted = ", ".join(map(str, shape))
        yield f"the model takes images [N, {wanted}], these are {[*images.shape]}"
    if not images.by_rows:
        yield "images are in Fortran order: save numpy.ascontiguousarray(images)"
    if labels.dtype.kind not in "iu":
        yield f"labels are integers, not {labels.dtype}"
    if labels.shape != images.shape[:1] or labels.shape == (0,):
        yield f"one label per image is needed, and at least one image; labels are {[*labels.shape]}"
