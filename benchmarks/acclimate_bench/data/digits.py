"""Digits: a real change of domain. A network learned from MNIST answers clients who send digits of another data set.

accuracy.json       recorded accuracies by shift and method, one for each client of the full set
model.safetensors   weights of the ShallowCNN, the same for both shifts
balanced_source.npz `prior` [10] and class moments of the BatchNorm layers
<shift>.npz         images [C, N, 28, 28] uint8, labels [C, N] int64, and in a reduced set `clients` [C]:
                    the numbers that its clients have in the full one
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import TypeAdapter, ValidationError

from acclimate_adapters import Source
from acclimate_bench.data.shift import (
    ACCURACY,
    MODEL,
    MOMENTS,
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

DIGITS = ("domain", "domain_label")
CARRIED = Path(__file__).parents[2] / "data/digits"
INPUT = InputSpec(channels=1, height=28, width=28, mean=(0.0,), std=(1.0,))
RECORDED: Final = {"none": "none", "bn_adapt_16": "bn_adapt", "em_2": "em"}
# Of the others nobody chose any, so they run at their defaults; surgical and memo have none that suit every network.
HPARAMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bn_adapt": {"prior_strength": 16},
    "em": {"epochs": 2},
    "tent": {},
    "shot": {},
    "t3a": {},
}
_ACCURACIES = TypeAdapter(Mapping[str, tuple[float, ...]])


def check_digits(folder: Path, shifts: Sequence[str]) -> None:
    """Look for everything that some of these shifts need; raises BenchError naming what is missing."""
    files = (ACCURACY, MODEL, MOMENTS)
    check_files(folder, [*files, *(f"{shift}.npz" for shift in shifts)], f"{', '.join(files)} and <shift>.npz")


def load_digits(folder: Path, name: str) -> Shift:
    """Read one shift.

    Raises:
        BenchError: a file is missing or holds something else.
    """
    check_digits(folder, [name])
    target = read_target(folder / f"{name}.npz", INPUT)
    model = load_network(folder, _read_source(folder))
    recorded = _recorded(folder, name, target.images.shape[1])
    return Shift(name, model, INPUT, target.clients, target.images, target.labels, HPARAMS, recorded)


def _recorded(folder: Path, name: str, images: int) -> dict[str, Recorded]:
    try:
        found = _ACCURACIES.validate_python(read_json(folder / ACCURACY)[name])
    except (KeyError, TypeError, ValidationError) as error:
        raise BenchError(f"{folder / ACCURACY} does not describe the shift {name!r}: {error}") from error
    return {RECORDED[key]: Recorded(images, dict(enumerate(found[key]))) for key in RECORDED if key in found}


def _read_source(folder: Path) -> Source:
    arrays = read_arrays(folder / MOMENTS, "prior")
    moments = {name: torch.from_numpy(value) for name, value in arrays.items() if name.startswith("bn")}
    return Source(prior=torch.from_numpy(arrays["prior"]).float(), moments=moments)
