"""What computes the passes that need no gradient: torch, or ONNX Runtime where a bundle carries their graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, Pass
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import Blending, Passes, Rows, TorchPasses
from acclimate_adapters.consensus import PRIOR_STRENGTH
from acclimate_store.errors import GraphError
from acclimate_store.files import BALANCED_GRAPH, BLENDED_GRAPH, FROZEN_GRAPH, STEM_GRAPH

Choice: TypeAlias = Literal["auto", "onnx", "torch"]
"""`auto` takes ONNX Runtime where it can; `onnx` insists on it."""
TOLERANCE = 1e-4
"""Largest difference of a pass from torch, relative to the largest value."""
STEP_TOLERANCE = 1e-3
"""The same of what follows its own statistics, a step of `balanced` or the pass of BN-Adapt: on a network of random
weights rounding to single precision changes a step in torch by 2e-5, its first pass by 2e-7, and ONNX Runtime's order
of sums a step by 1e-4."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A model with what computes its passes.

    Args:
        name: of the runtime and its version; another one may differ in the last bits.
        model: the model, whose frozen passes are computed by it.
        passes: those of `balanced` and `consensus`; None for torch's.
    """

    name: str
    model: FrozenModel
    passes: Passes | None = None


def choose(choice: Choice, model: FrozenModel, directory: Path, files: Mapping[str, str], probe: Tensor) -> Runtime:
    """The runtime of a model, with as many threads as torch has in the calling one.

    Args:
        choice: what is wanted.
        model: of the bundle.
        directory: of the bundle.
        files: of the bundle.
        probe: a batch [B, C, H, W] that the runtime must answer like torch.

    Raises:
        GraphError: `onnx` cannot be had, with the reason; or a graph fails, or gives other answers than torch.
    """
    in_torch = Runtime(f"torch {torch.__version__}", model)
    if choice == "torch":
        return in_torch
    obstacle = _obstacle(model, files)
    if obstacle is None:
        try:
            return _in_onnx(model, directory, files, probe)
        except GraphError:
            raise
        except Exception as error:  # ONNX Runtime's own have no common base
            raise GraphError(f"the bundle's ONNX graphs cannot be run: {error}; export them again") from error
    if choice == "onnx":
        raise GraphError(f"ONNX Runtime cannot serve this bundle: {obstacle}")
    return in_torch


def _obstacle(model: FrozenModel, files: Mapping[str, str]) -> str | None:
    if FROZEN_GRAPH not in files:
        return f"it carries no {FROZEN_GRAPH}; `acclimate models add-onnx` publishes a version that does"
    if find_spec("onnxruntime") is None:
        return 'onnxruntime is not installed; the extra "cpu" has it: pip install "acclimate[cpu]"'
    from acclimate_store.onnx_graphs import provider_for  # torch alone is enough for a bundle without graphs

    try:
        provider_for(model.device)
    except GraphError as error:
        return str(error)
    return None


def _in_onnx(model: FrozenModel, directory: Path, files: Mapping[str, str], probe: Tensor) -> Runtime:
    from acclimate_store.onnx_graphs import OnnxFrozen, OnnxPasses, runtime_version

    threads = torch.get_num_threads()
    frozen = OnnxFrozen((directory / FROZEN_GRAPH).read_bytes(), model, threads)
    _check_frozen(model, frozen, probe)
    passes = None
    if BALANCED_GRAPH in files:
        if STEM_GRAPH not in files:
            hint = "`acclimate models add-onnx` publishes a version that has it"
            raise GraphError(f"{BALANCED_GRAPH} needs {STEM_GRAPH}, which the bundle lacks: {hint}")
        stem, bent = ((directory / file).read_bytes() for file in (STEM_GRAPH, BALANCED_GRAPH))
        blended = (directory / BLENDED_GRAPH).read_bytes() if BLENDED_GRAPH in files else None
        passes = OnnxPasses(stem, bent, blended, model, threads)
        _check_balanced(model, passes, probe)
        if blended is not None:
            _check_blended(model, passes, probe)
    return Runtime(runtime_version(), model.with_runtime(frozen), passes)


def _check_frozen(model: FrozenModel, frozen: Callable[[Tensor], Pass], probe: Tensor) -> None:
    x = model.batch(probe)
    mine, other = model.frozen(x), frozen(x)
    _check(FROZEN_GRAPH, TOLERANCE, (mine.features, other.features), (mine.logits, other.logits))


def _check_balanced(model: FrozenModel, passes: Passes, probe: Tensor) -> None:
    """By two clients, each with a part of the batch, since that is what the graph is for."""
    adapter, batches = Balanced(), list(probe.chunk(2))
    states = [adapter.init(model) for _ in batches]
    in_torch, in_onnx = (adapter.step_many(model, states, batches, by) for by in (None, passes))
    for mine, other in zip(in_torch, in_onnx, strict=True):
        state = ((tensor, other.state.tensors[name]) for name, tensor in mine.state.tensors.items())
        _check(f"{STEM_GRAPH} with {BALANCED_GRAPH}", STEP_TOLERANCE, (mine.logits, other.logits), *state)


def _check_blended(model: FrozenModel, passes: Passes, probe: Tensor) -> None:
    """By two clients, as `_check_balanced`."""
    source, batches = SourceMoments.of(model), model.batch(probe).chunk(2)
    rows, blending = Rows.of(batches, source.prior), Blending.of(batches, PRIOR_STRENGTH, source.prior)
    mine, other = (by(rows).blended(blending) for by in (TorchPasses(model, source), passes))
    _check(f"{STEM_GRAPH} with {BLENDED_GRAPH}", STEP_TOLERANCE, (mine, other))


def _check(file: str, tolerance: float, *answers: tuple[Tensor, Tensor]) -> None:
    """Compare what torch gives with what a graph does.

    Raises:
        GraphError: they differ.
    """
    for mine, other in answers:
        difference = float((mine - other).abs().max() / mine.abs().max().clamp_min(1e-12))
        if not difference <= tolerance:  # which NaN is not either
            raise GraphError(
                f"{file} answers a test batch otherwise than torch: they differ by {difference:.1e} of the largest "
                f"value, more than {tolerance:g}; export it again with `acclimate models add-onnx`"
            )
