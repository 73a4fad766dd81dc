"""The benchmark's folder: per shift a frozen network, its source quantities, target clients and recorded accuracies.

accuracy.json               hyper-parameters and recorded accuracies by shift and method
balanced_accuracy.json      the same of the method `balanced`; optional
<shift>/model.safetensors   weights of the ShallowCNN
<shift>/rates.json          adaptation rates by tensor name
<shift>/aux.npz             confusion counts, prototypes, descriptor
<shift>/balanced_source.npz class moments of the BatchNorm layers
<shift>/target.npz          images [C, N, 28, 28] uint8, labels [C, N] int64, and in a reduced set `clients` [C]:
                            the numbers that its clients have in the full one
<shift>/anchors.npz         a few labelled source images; optional
"""

import filecmp
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from acclimate_adapters import Anchors, FrozenModel, Source
from acclimate_service.bench.errors import BenchError
from acclimate_store import BundleError, InputSpec
from acclimate_store.shallow_cnn import ShallowCNN
from acclimate_store.tensors import load_weights

SHIFTS = ("feature", "label", "hybrid", "multitype")
CARRIED = Path("benchmarks/data/fashion")
CLASSES = 10
INPUT = InputSpec(channels=1, height=28, width=28, mean=(0.286,), std=(0.353,))
FILES = ("model.safetensors", "rates.json", "aux.npz", "balanced_source.npz", "target.npz")
ACCURACY, BALANCED, MODEL, ANCHORS = "accuracy.json", "balanced_accuracy.json", "model.safetensors", "anchors.npz"
SUBSET = "memo_subset"  # the images on which slow methods were recorded


class MethodRecord(BaseModel):
    """What `accuracy.json` says of one method; the last three for a subset only."""

    model_config = ConfigDict(frozen=True)

    per_client: tuple[float, ...]
    clients: tuple[int, ...] | None = None
    images_per_client: int | None = None
    lr: float | None = None


class ShiftRecord(BaseModel):
    """What `accuracy.json` says of one shift."""

    model_config = ConfigDict(frozen=True)

    methods: Mapping[str, MethodRecord]
    hparams: Mapping[str, Mapping[str, Any]]


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
    clients: tuple[int, ...]  # their numbers in the full set
    images: NDArray[np.uint8]  # [C, N, H, W], in the order of sending
    labels: NDArray[np.int64]  # [C, N]
    hparams: Mapping[str, Mapping[str, Any]]  # method -> recorded hyper-parameters
    recorded: Mapping[str, Recorded]  # method -> recorded accuracies


def check_folder(folder: Path, shifts: Sequence[str]) -> None:
    """Look for everything that the shifts need, before any of them is run.

    Raises:
        BenchError: naming what is missing.
    """
    needed = [ACCURACY, *(f"{shift}/{file}" for shift in shifts for file in FILES)]
    absent = [file for file in needed if not (folder / file).is_file()]
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise BenchError(
            f"{folder} is no benchmark folder, it lacks {absent[0]}{others}; expected are "
            f"{ACCURACY} and, for each shift, a folder with {', '.join(FILES)}"
        )


def load_shift(folder: Path, name: str) -> Shift:
    """Read one shift.

    Raises:
        BenchError: a file is missing or holds something else.
    """
    check_folder(folder, [name])
    record = _record(folder, name)
    target = _arrays(folder / name / "target.npz", "images", "labels")
    images, labels = target["images"], target["labels"]
    if images.dtype != np.uint8 or images.shape != (*labels.shape, *INPUT.shape[1:]):
        raise BenchError(f"{name}/target.npz needs images uint8 [C, N, 28, 28] and as many labels [C, N]")
    clients = tuple(int(number) for number in target.get("clients", range(len(images))))
    recorded = {method: _recorded(entry, images.shape[1]) for method, entry in record.methods.items()}
    hparams = {**record.hparams}
    if SUBSET in record.methods:
        hparams["memo"] = {"lr": record.methods[SUBSET].lr}
    return Shift(name, _load_model(folder / name), clients, images, labels, hparams, recorded)


def normalised(images: NDArray[np.uint8]) -> Tensor:
    """Network input [B, 1, H, W] of images [B, H, W]."""
    return INPUT.normalise(images[:, None])


def _record(folder: Path, name: str) -> ShiftRecord:
    document = _json(folder / ACCURACY)
    try:
        record = ShiftRecord.model_validate(document["shifts"][name])
        if (folder / BALANCED).is_file():
            balanced = MethodRecord.model_validate(_json(folder / BALANCED)["shifts"][name])
            record = record.model_copy(update={"methods": {**record.methods, "balanced": balanced}})
    except (KeyError, TypeError, ValidationError) as error:
        raise BenchError(f"{folder / ACCURACY} does not describe the shift {name!r}: {error}") from error
    return record


def _recorded(entry: MethodRecord, images: int) -> Recorded:
    clients = entry.clients or range(len(entry.per_client))
    return Recorded(entry.images_per_client or images, dict(zip(clients, entry.per_client, strict=True)))


def _load_model(folder: Path) -> FrozenModel:
    net = ShallowCNN(num_classes=CLASSES)
    try:
        load_weights(net, folder)
    except BundleError as error:
        raise BenchError(f"{folder}: {error}") from error
    return FrozenModel.from_module(net, classifier="linear5", source=_read_source(folder))


def _read_source(folder: Path) -> Source:
    counts = ("bbse_counts_soft", "bbse_counts_hard")
    measured = _arrays(folder / "aux.npz", *counts, "prototypes", "local_descriptor_mean")
    moments = _arrays(folder / "balanced_source.npz")
    return Source(
        prior=torch.full((CLASSES,), 1 / CLASSES),
        rates=_json(folder / "rates.json")["rates"],
        confusion={name.removeprefix("bbse_counts_"): _columns(measured[name]) for name in counts},
        prototypes=torch.from_numpy(measured["prototypes"]),
        descriptor=torch.from_numpy(measured["local_descriptor_mean"]),
        anchors=_anchors(folder),
        moments={name: torch.from_numpy(value) for name, value in moments.items() if name.startswith("bn")},
    )


def _anchors(folder: Path) -> Anchors | None:
    """Labelled source images of the folder, or those that the project carries for the very same weights."""
    carried = CARRIED / folder.name
    for place in (folder, carried):
        if (place / ANCHORS).is_file() and filecmp.cmp(place / MODEL, folder / MODEL, shallow=False):
            arrays = _arrays(place / ANCHORS, "images", "labels")
            return Anchors(normalised(arrays["images"]), torch.from_numpy(arrays["labels"]))
    return None


def _columns(counts: NDArray[np.float32]) -> Tensor:
    """Counts [predicted, true] to P(predicted | true)."""
    return torch.from_numpy(counts / counts.sum(axis=0, keepdims=True))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error


def _arrays(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, read without pickle; those named must be there."""
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
