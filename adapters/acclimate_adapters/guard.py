"""Label-free guard rails around a step.

A step that went wrong answers with the frozen model and leaves the state as it was. If it is wanted, a batch moves the
state no further than the client's own history makes plausible.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from acclimate_adapters import functional
from acclimate_adapters.adapter import Adapter, Step
from acclimate_adapters.errors import NumericalError
from acclimate_adapters.frames import Frames
from acclimate_adapters.functional import entropy
from acclimate_adapters.network.model import FrozenModel, require_finite
from acclimate_adapters.state import State

SMALLEST_COLLAPSE = 8  # rows; fewer may well show one class only


def guarded_step(adapter: Adapter, model: FrozenModel, state: State, x: Tensor, influence: float = 0.0) -> Step:
    """`adapter.step` behind the guard rails.

    Frames that tell nothing, because they are flat or repeat another, are answered and not folded in: see `Frames`.

    A step falls back when its logits or its new state are not finite, or when adaptation collapsed: see `collapsed`. An
    adapter that came across no frozen logits is judged by a frozen pass of its own, which is taken only if the whole
    batch was predicted as one class.

    A correction of the class prior is never judged: one class may be the truth about a client, and the evidence it
    keeps is uncorrected, so the next batches put it right. What is judged is the answer before the correction.

    Deterministic like the step itself: the same state and batch fall back again.

    Args:
        adapter: the adapter.
        model: the frozen model.
        state: the client's state.
        x: [B, C, H, W], normalised.
        influence: 0, or how many mean batches of the client this one may count for: see `bounded`. Frames of noise
            then count for nothing, in however many batches they come.

    Returns:
        The step, with three more signals: "skipped" is the share of the rows that were not folded in; "collapsed" is 1
        when the answer is one class that the frozen model does not see, whether or not that is held against the
        adapter; "fallback" is 1 when the frozen model answers.

    Raises:
        InputError, StateMismatch: as `Adapter.step`.
        NumericalError: the frozen model itself answers with non-finite numbers.
    """
    x = model.batch(x)
    frames = Frames.of(x, without_noise=influence > 0)
    folded = frames.of_step(x)

    def take() -> Step:
        step = guard(lambda: adapter.step(model, state, folded), state, lambda: model.frozen(folded).logits)
        return limited(adapter, model, state, step, rows=len(folded), influence=influence)

    return frames.answer(adapter, model, state, x, take)


def guard(take: Callable[[], Step], state: State, frozen_logits: Callable[[], Tensor]) -> Step:
    """A step behind the guard rails, as `guarded_step`.

    Args:
        take: takes the step.
        state: before it.
        frozen_logits: gives what the frozen model answers, [B, K]; called when the step does not tell and it matters.
    """
    try:
        step = take()
    except NumericalError:
        step = None
    if step is None or not functional.finite(step.logits) or not finite(step.state):
        return _fall_back(state, require_finite(frozen_logits()), collapse=False)
    if not one_class(step.logits):
        return _signalling(step, collapse=False)
    frozen = step.frozen_logits if step.frozen_logits is not None else frozen_logits()
    adapted = step.logits if step.uncorrected is None else step.uncorrected
    if collapsed(adapted, frozen):
        return _fall_back(state, frozen, collapse=True)
    return _signalling(step, collapse=collapsed(step.logits, frozen))


@runtime_checkable
class Bounding(Adapter, Protocol):
    """An adapter that knows better than `norm_capped` what bounds the influence of a batch on its state."""

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """The state after a batch of so many rows; see `bounded`.

        Args:
            model: the frozen model.
            before: the state before the batch, which was not the first.
            after: the state after it.
            rows: of the batch.
            influence: above 0; a batch may count for so many times what a mean batch counted for.
        """
        ...


def bounded(adapter: Adapter, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
    """The state after a batch, moved no further than the client's own history makes plausible.

    `Bounding` adapters do that in their own way, such as by the rows that a batch counts for; the modules of all others
    are `norm_capped`. The first batch, without a history, is not bounded.

    Args:
        adapter: which took the step.
        model: the frozen model.
        before: the client's state before the batch.
        after: the client's state after it.
        rows: of the batch.
        influence: above 0; a batch may count for so many times what a mean batch counted for.
    """
    if before.step == 0:
        return after
    if isinstance(adapter, Bounding):
        return adapter.bounded(model, before, after, rows, influence)
    return norm_capped(adapter, model, before, after, influence)


def limited(adapter: Adapter, model: FrozenModel, before: State, step: Step, *, rows: int, influence: float) -> Step:
    """A guarded step whose state is `bounded`; the step itself where nothing is to be bounded or it fell back."""
    if influence <= 0 or step.state is before:
        return step
    return replace(step, state=bounded(adapter, model, before, step.state, rows, influence))


def norm_capped(adapter: Adapter, model: FrozenModel, before: State, after: State, influence: float) -> State:
    """The state whose every module moves by at most `influence` |D| / k, in the Euclidean norm.

    D is its distance from that of a new client before the batch, k the number of batches before: |D| / k is how far a
    mean batch moved it. For a mean of directions this bounds the distance of the new direction from the mean by
    `influence` times the length of the mean.
    """
    start, share = adapter.init(model).tensors, influence / before.step
    capped = {
        name: _capped(start.get(name, torch.zeros_like(tensor)), before.tensors[name], tensor, share)
        for name, tensor in after.tensors.items()
        if name in before.tensors and tensor.is_floating_point()
    }
    return replace(after, tensors={**after.tensors, **capped})


def _capped(start: Tensor, before: Tensor, after: Tensor, share: float) -> Tensor:
    """A tensor that moved by at most `share` times its distance from the start before."""
    before = before.to(after)
    most = share * float(torch.linalg.vector_norm(before - start.to(after)))
    change = after - before
    length = float(torch.linalg.vector_norm(change))
    return after if length <= most else before + change * (most / length)


def one_class(logits: Tensor) -> bool:
    """Whether all of at least 8 rows of logits [B, K] are predicted as the same class."""
    winners = logits.argmax(dim=-1)
    return len(winners) >= SMALLEST_COLLAPSE and bool((winners == winners[0]).all())


def collapsed(adapted: Tensor, frozen: Tensor) -> bool:
    """Whether adaptation drove a batch into one class that the frozen model does not see.

    All of at least 8 rows are predicted as one class, with lower entropy than before, while the frozen model gives
    that class to fewer than half of them.

    Args:
        adapted, frozen: [B, K] logits.
    """
    if not one_class(adapted):
        return False
    agreement = float((frozen.argmax(dim=-1) == adapted[0].argmax()).float().mean())
    return agreement < 0.5 and float(entropy(adapted).mean()) < float(entropy(frozen).mean())


def finite(state: State) -> bool:
    """Whether all numbers of a state are finite."""
    tensors = [t for t in state.tensors.values() if t.is_floating_point()]
    sums = [t.sum() for t in tensors if t.device.type != "cpu"]
    if sums and bool(torch.stack([each.to(sums[0]) for each in sums]).isfinite().all()):  # one wait for the device
        tensors = [t for t in tensors if t.device.type == "cpu"]
    return all(map(functional.finite, tensors))


def _signalling(step: Step, *, collapse: bool) -> Step:
    return replace(step, signals={**step.signals, "collapsed": float(collapse), "fallback": 0.0})


def _fall_back(state: State, logits: Tensor, *, collapse: bool) -> Step:
    signals = {"entropy": float(entropy(logits).mean()), "collapsed": float(collapse), "fallback": 1.0}
    return Step(logits, state, signals, logits)
