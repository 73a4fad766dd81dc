"""Recorded client streams: images as one client would send them, with labels to score the answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from acclimate_store.errors import SampleError

_DIMENSIONS = {"client_ids": 1, "images": 5, "labels": 2, "corruption": 1, "severity": 1}


@dataclass(frozen=True, slots=True, eq=False)
class ClientStream:
    """What one client sends, in order."""

    client_id: str
    images: NDArray[np.uint8]  # [N, C, H, W]
    labels: NDArray[np.int64]  # [N], true classes; never shown to the service
    corruption: str
    severity: int  # 1 (weak) to 5 (strong)


def load_streams(path: Path) -> tuple[ClientStream, ...]:
    """Read an .npz file of client streams, without pickle.

    The file holds, for M clients of N images each: `client_ids` [M], `images` uint8 [M, N, C, H, W], `labels` int64
    [M, N], `corruption` [M] and `severity` [M].

    Raises:
        SampleError: the file cannot be read, an array is missing, or shapes and types contradict each other.
    """
    arrays = _read(path)
    problems = _problems(arrays)
    if problems:
        raise SampleError(f"{path} does not hold client streams:", problems)
    columns = (arrays[name] for name in _DIMENSIONS)
    return tuple(
        ClientStream(str(client_id), images, labels, str(corruption), int(severity))
        for client_id, images, labels, corruption, severity in zip(*columns, strict=True)
    )


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # Not np.load, which leaves the file open when it is no archive.
        with path.open("rb") as file, NpzFile(file, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise SampleError(f"{path} cannot be read as an .npz file without pickle: {error}") from error


def _problems(arrays: dict[str, NDArray[Any]]) -> list[str]:
    absent = [f"array {name} is missing" for name in _DIMENSIONS if name not in arrays]
    return absent or _rank_problems(arrays) or _content_problems(arrays)


def _rank_problems(arrays: dict[str, NDArray[Any]]) -> list[str]:
    ranks = {name: (arrays[name].ndim, needed) for name, needed in _DIMENSIONS.items()}
    return [f"{name} needs {needed} dimensions, not {rank}" for name, (rank, needed) in ranks.items() if rank != needed]


def _content_problems(arrays: dict[str, NDArray[Any]]) -> list[str]:
    images, labels = arrays["images"], arrays["labels"]
    found = []
    if images.dtype != np.uint8 or labels.dtype != np.int64:
        found.append(f"images must be uint8 and labels int64, not {images.dtype} and {labels.dtype}")
    if images.shape[:2] != labels.shape or len({len(arrays[name]) for name in _DIMENSIONS}) != 1:
        found.append("every client needs one id, corruption and severity, and every image one label")
    return found
