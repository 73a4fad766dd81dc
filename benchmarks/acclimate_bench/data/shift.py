"""Clients with a known shift, the network that they share, and how their files are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters import FrozenModel, Source
from acclimate_bench.errors import BenchError
from acclimate_store import BundleError, InputSpec
from acclimate_store.files import load_weights
from acclimate_store.shallow_cnn import ShallowCNN

CLASSES = 10
MODEL, ACCURACY, MOMENTS = "model.safetensors", "accuracy.json", "balanced_source.npz"
SUBSET = "memo_subset"  # the images on which slow methods were recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the reference program reached with one method on the first images of some clients."""

    images: int
    accuracy: Mapping[int, float]  # client -> 0..1


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """Clients that differ in one way from the source, and the network they share."""

    name: str
    model: FrozenModel
    spec: InputSpec
    clients: tuple[int, ...]  # their numbers in the full set
    images: NDArray[np.uint8]  # [C, N, H, W], in the order of sending
    labels: NDArray[np.int64]  # [C, N]
    hparams: Mapping[str, Mapping[str, Any]]  # method -> recorded hyper-parameters
    recorded: Mapping[str, Recorded]  # method -> recorded accuracies

    def x(self, row: int) -> Tensor:
        """Network input [N, 1, H, W] of one client."""
        return self.spec.normalise(self.images[row][:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The clients of one file: `images`, `labels`, and in a reduced set `clients`, as in `Shift`."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    clients: tuple[int, ...]


def check_files(folder: Path, needed: Sequence[str], expected: str) -> None:
    """Look for all files of a benchmark folder.

    Raises:
        BenchError: naming what is missing, and what is expected.
    """
    absent = [file for file in needed if not (folder / file).is_file()]
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise BenchError(f"{folder} is no benchmark folder, it lacks {absent[0]}{others}; expected are {expected}")


def read_target(path: Path, spec: InputSpec) -> Target:
    """Read clients.

    Raises:
        BenchError: the file holds something else.
    """
    arrays = read_arrays(path, "images", "labels")
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.shape != (*labels.shape, *spec.shape[1:]):
        raise BenchError(f"{path} needs images uint8 [C, N, {spec.height}, {spec.width}] and as many labels [C, N]")
    return Target(images, labels, tuple(int(number) for number in arrays.get("clients", range(len(images)))))


def load_network(folder: Path, source: Source) -> FrozenModel:
    """The network whose weights a folder holds, with what was measured at its source.

    Raises:
        BenchError: the weights cannot be read, or are those of another network.
    """
    net = ShallowCNN(num_classes=CLASSES)
    try:
        load_weights(net, folder)
    except BundleError as error:
        raise BenchError(f"{folder}: {error}") from error
    return FrozenModel.from_module(net, classifier="linear5", source=source)


def read_json(path: Path) -> Any:
    """Read JSON; raises BenchError if it is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error


def read_arrays(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, read without pickle; those named must be there.

    Raises:
        BenchError: the file cannot be read, or an array is missing.
    """
    try:
        # Not np.load, which leaves the file open when it is no archive.
        with path.open("rb") as file, NpzFile(file, allow_pickle=False) as archive:
            arrays = dict(archive)
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise BenchError(f"{path} cannot be read as an .npz file without pickle: {error}") from error
    absent = [name for name in names if name not in arrays]
    if absent:
        raise BenchError(f"{path} lacks the arrays {', '.join(absent)}")
    return arrays
