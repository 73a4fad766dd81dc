"""Label-free guard rails: a step that went wrong answers with the frozen model and leaves the state as it was."""

from dataclasses import replace

from torch import Tensor

from acclimate_adapters.adapter import Adapter, Step
from acclimate_adapters.errors import NumericalError
from acclimate_adapters.functional import entropy
from acclimate_adapters.model import FrozenModel, require_finite
from acclimate_adapters.state import State

SMALLEST_COLLAPSE = 8  # rows; fewer may well show one class only


def guarded_step(adapter: Adapter, model: FrozenModel, state: State, x: Tensor) -> Step:
    """`adapter.step` behind the guard rails; the signal "fallback" is 1 when they acted.

    A step falls back when its logits or its new state are not finite, or when it collapsed. Deterministic like the
    step itself: the same state and batch fall back again.

    Args:
        x: [B, C, H, W], normalised.

    Raises:
        InputError, StateMismatch: as `Adapter.step`.
        NumericalError: the frozen model itself answers with non-finite numbers.
    """
    try:
        step = adapter.step(model, state, x)
    except NumericalError:
        return _fall_back(state, require_finite(model.frozen(model.batch(x)).logits))
    if not _finite(step.state):
        return _fall_back(state, require_finite(model.frozen(model.batch(x)).logits))
    if step.frozen_logits is not None and collapsed(step.logits, step.frozen_logits):
        return _fall_back(state, step.frozen_logits)
    return replace(step, signals={**step.signals, "fallback": 0.0})


def collapsed(adapted: Tensor, frozen: Tensor) -> bool:
    """Whether adaptation drove a batch into one class that the frozen model does not see.

    All of at least 8 rows are predicted as one class, with lower entropy than before, while the frozen model gives
    that class to fewer than half of them.

    Args:
        adapted, frozen: [B, K] logits.
    """
    winners = adapted.argmax(dim=-1)
    if len(winners) < SMALLEST_COLLAPSE or bool((winners != winners[0]).any()):
        return False
    agreement = float((frozen.argmax(dim=-1) == winners[0]).float().mean())
    return agreement < 0.5 and float(entropy(adapted).mean()) < float(entropy(frozen).mean())


def _finite(state: State) -> bool:
    return all(bool(t.isfinite().all()) for t in state.tensors.values() if t.is_floating_point())


def _fall_back(state: State, logits: Tensor) -> Step:
    return Step(logits, state, {"entropy": float(entropy(logits).mean()), "fallback": 1.0}, logits)
