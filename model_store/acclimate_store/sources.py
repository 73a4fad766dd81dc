"""`Source` to and from the two files of a bundle: tensors in `source.safetensors`, rates in `source.json`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from acclimate_adapters import Anchors, FrozenModel, Source
from acclimate_adapters.errors import ConfigurationError
from acclimate_store.errors import IntegrityError, TensorError
from acclimate_store.files import (
    SOURCE_FILE,
    SOURCE_RECORD_FILE,
    encode_tensors,
    missing_file,
    non_finite,
    read_tensors,
)
from acclimate_store.manifest import InputSpec, Record, parse_strictly

_ANCHORS = ("anchors.inputs", "anchors.labels")
_MOMENTS = ("class_mean", "class_square", "row_var")
_NAME = re.compile(
    r"prior|prototypes|descriptor|confusion(\.soft|\.hard)?|anchors\.(inputs|labels)"
    rf"|moments\..+\.({'|'.join(_MOMENTS)})"
)


class SourceRecord(Record):
    """What `source.json` says: the adaptation rate of each module by tensor name, or null when none were learned."""

    schema_version: Literal[1] = 1
    rates: Mapping[str, float] | None


def encode_source(source: Source) -> dict[str, bytes]:
    """The files that hold a source, by name."""
    record = SourceRecord(rates=None if source.rates is None else dict(source.rates))
    return {
        SOURCE_FILE: encode_tensors(source.tensors()),
        SOURCE_RECORD_FILE: (record.model_dump_json(indent=2) + "\n").encode(),
    }


def read_source(directory: Path, spec: InputSpec, device: torch.device | str = "cpu") -> Source:
    """Read the source of a bundle.

    Args:
        directory: of the bundle.
        spec: the input specification, which anchors must meet.
        device: where its tensors go.

    Raises:
        IntegrityError: a file is missing.
        ManifestError: `source.json` is malformed or holds a non-finite rate.
        TensorError: a tensor is unknown, missing, not finite or out of its range.
    """
    record_path = directory / SOURCE_RECORD_FILE
    if not record_path.is_file():
        raise IntegrityError(missing_file(SOURCE_RECORD_FILE))
    record = parse_strictly(SourceRecord, SOURCE_RECORD_FILE, record_path.read_bytes())
    found = read_tensors(directory, SOURCE_FILE, device)
    _refuse(_name_problems(found))
    _refuse([*non_finite(found), *_anchor_problems(found, spec)])
    try:
        return _assemble(found, record.rates)
    except ConfigurationError as error:
        raise TensorError(f"{SOURCE_FILE}: {error}") from error


def check_source(model: FrozenModel) -> None:
    """Compare a source with the network it was loaded for; what `FrozenModel` checks itself is left to it.

    Raises:
        TensorError: every tensor whose shape does not fit the network.
    """
    _refuse(_shape_problems(model))


def _refuse(problems: Iterable[str]) -> None:
    found = [f"{SOURCE_FILE}: {problem}" for problem in problems]
    if found:
        raise TensorError(f"{SOURCE_FILE} cannot be used:", found)


def _name_problems(found: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(found):
        if not _NAME.fullmatch(name):
            yield f"{name} is unknown"
    if "prior" not in found:
        yield "prior is missing"
    if "confusion" in found and {"confusion.soft", "confusion.hard"} & found.keys():
        yield "confusion serves both modes; remove it or confusion.soft and confusion.hard"
    present = [name for name in _ANCHORS if name in found]
    if len(present) == 1:
        yield f"{present[0]} needs its partner of {' and '.join(_ANCHORS)}"


def _anchor_problems(found: Mapping[str, Tensor], spec: InputSpec) -> Iterator[str]:
    inputs = found.get("anchors.inputs")
    if inputs is not None and tuple(inputs.shape[1:]) != spec.shape:
        yield f"anchors.inputs has shape {list(inputs.shape)}, the input specification asks for [N, {spec.extent}]"


def _assemble(found: Mapping[str, Tensor], rates: Mapping[str, float] | None) -> Source:
    modes = {mode: found[f"confusion.{mode}"] for mode in ("soft", "hard") if f"confusion.{mode}" in found}
    prefix = "moments."
    return Source(
        prior=found["prior"],
        rates=rates,
        confusion=modes or found.get("confusion"),
        prototypes=found.get("prototypes"),
        descriptor=found.get("descriptor"),
        anchors=Anchors(found["anchors.inputs"], found["anchors.labels"]) if _ANCHORS[0] in found else None,
        moments={name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)},
    )


def _shape_problems(model: FrozenModel) -> Iterator[str]:
    found, expected = model.source.tensors(), _expected_shapes(model)
    for name, tensor in found.items():
        if name in _ANCHORS:
            continue
        if name not in expected:
            yield f"{name} belongs to no BatchNorm layer of the network"
        elif list(tensor.shape) != expected[name]:
            yield f"{name} has shape {list(tensor.shape)}, the network needs {expected[name]}"
    if model.source.moments:
        for name in sorted(expected.keys() - found.keys()):
            if name.startswith("moments."):
                yield f"{name} is missing"


def _expected_shapes(model: FrozenModel) -> dict[str, list[int]]:
    k, d = model.classes, model.feature_size
    shapes = {"prior": [k], "prototypes": [k, d], "descriptor": [d]}
    shapes |= {name: [k, k] for name in ("confusion", "confusion.soft", "confusion.hard")}
    for statistic in model.statistics:
        layer, _, kind = statistic.rpartition(".")
        if kind == "running_mean":
            channels = len(model.tensor(statistic))
            for moment, shape in zip(_MOMENTS, ([k, channels], [k, channels], [channels]), strict=True):
                shapes[f"moments.{layer}.{moment}"] = shape
    return shapes
