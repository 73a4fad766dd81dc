"""Federated Fashion-MNIST: four kinds of simulated shift, each with a network of its own.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from acclimate_adapters import Anchors, Source
from acclimate_bench.data.shift import (
    ACCURACY,
    CLASSES,
    MODEL,
    MOMENTS,
    SUBSET,
    Recorded,
    Shift,
    check_files,
    load_network,
    read_arrays,
    read_json,
    read_target,
)
from acclimate_bench.errors import BenchError
from acclimate_store import InputSpec

FASHION = ("feature", "label", "hybrid", "multitype")
CARRIED = Path(__file__).parents[2] / "data/fashion"
INPUT = InputSpec(channels=1, height=28, width=28, mean=(0.286,), std=(0.353,))
FILES = (MODEL, "rates.json", "aux.npz", MOMENTS, "target.npz")
BALANCED, ANCHORS = "balanced_accuracy.json", "anchors.npz"


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


def check_fashion(folder: Path, shifts: Sequence[str]) -> None:
    """Look for everything that some of these shifts need; raises BenchError naming what is missing."""
    needed = [ACCURACY, *(f"{shift}/{file}" for shift in shifts for file in FILES)]
    check_files(folder, needed, f"{ACCURACY} and, for each shift, a folder with {', '.join(FILES)}")


def load_fashion(folder: Path, name: str) -> Shift:
    """Read one shift.

    Raises:
        BenchError: a file is missing or holds something else.
    """
    check_fashion(folder, [name])
    record = _record(folder, name)
    target = read_target(folder / name / "target.npz", INPUT)
    recorded = {method: _recorded(entry, target.images.shape[1]) for method, entry in record.methods.items()}
    hparams = {**record.hparams}
    if SUBSET in record.methods:
        hparams["memo"] = {"lr": record.methods[SUBSET].lr}
    model = load_network(folder / name, _read_source(folder / name))
    return Shift(name, model, INPUT, target.clients, target.images, target.labels, hparams, recorded)


def _record(folder: Path, name: str) -> ShiftRecord:
    document = read_json(folder / ACCURACY)
    try:
        record = ShiftRecord.model_validate(document["shifts"][name])
        if (folder / BALANCED).is_file():
            balanced = MethodRecord.model_validate(read_json(folder / BALANCED)["shifts"][name])
            record = record.model_copy(update={"methods": {**record.methods, "balanced": balanced}})
    except (KeyError, TypeError, ValidationError) as error:
        raise BenchError(f"{folder / ACCURACY} does not describe the shift {name!r}: {error}") from error
    return record


def _recorded(entry: MethodRecord, images: int) -> Recorded:
    clients = entry.clients or range(len(entry.per_client))
    return Recorded(entry.images_per_client or images, dict(zip(clients, entry.per_client, strict=True)))


def _read_source(folder: Path) -> Source:
    counts = ("bbse_counts_soft", "bbse_counts_hard")
    measured = read_arrays(folder / "aux.npz", *counts, "prototypes", "local_descriptor_mean")
    moments = read_arrays(folder / MOMENTS)
    return Source(
        prior=torch.full((CLASSES,), 1 / CLASSES),
        rates=read_json(folder / "rates.json")["rates"],
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
            arrays = read_arrays(place / ANCHORS, "images", "labels")
            return Anchors(INPUT.normalise(arrays["images"][:, None]), torch.from_numpy(arrays["labels"]))
    return None


def _columns(counts: NDArray[np.float32]) -> Tensor:
    """Counts [predicted, true] to P(predicted | true)."""
    return torch.from_numpy(counts / counts.sum(axis=0, keepdims=True))
