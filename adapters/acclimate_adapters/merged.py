"""Steps of several clients at once: rows that only need the same pass of the network go through it together.

In evaluation mode no row depends on another, so a client's step is, up to rounding, what it is alone; and one that
fails, fails alone.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from acclimate_adapters.adapter import Adapter, FrozenOnly, Step, slices
from acclimate_adapters.balanced.passes import Passes
from acclimate_adapters.frames import Frames
from acclimate_adapters.guard import finite, guard, limited
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import State

T = TypeVar("T")
Places: TypeAlias = Sequence[int]
"""Which of the works are meant, by their index."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step to be taken.

    Args:
        adapter: the client's.
        state: the client's.
        x: [B, C, H, W], its batch, normalised.
        repeated: whether the batch is the one before once more, which is answered and not folded in.
        compare: whether the step has to tell the frozen logits, even if the adapter needs none.
        taken: what `adapter.step` gave or raised on the rows that are folded in, where that was taken before.
    """

    adapter: Adapter
    state: State
    x: Tensor
    repeated: bool = False
    compare: bool = False
    taken: Step | Exception | None = None


@runtime_checkable
class Joint(Adapter, Protocol):
    """An adapter that takes the steps of several clients together, in passes of its own over all their rows."""

    def step_many(
        self, model: FrozenModel, states: Sequence[State], batches: Sequence[Tensor], passes: Passes | None = None
    ) -> list[Step]:
        """The steps of clients with this adapter; up to rounding, those of `step`. Raises what any of them raises."""
        ...


def mergeable(adapter: Adapter, model: FrozenModel) -> bool:
    """Whether steps of this adapter share their passes with others; never where a layer normalises by the batch."""
    return isinstance(adapter, FrozenOnly | Joint) and not model.skipped


def in_torch(adapter: Adapter, model: FrozenModel, passes: Passes | None) -> bool:
    """Whether torch runs the network in steps of this adapter, rather than the model's runtime or other `passes`."""
    if isinstance(adapter, Joint):
        return passes is None
    return model.runtime is None or not isinstance(adapter, FrozenOnly)


def guarded_steps(
    model: FrozenModel, works: Sequence[Work], passes: Passes | None = None, influence: float = 0.0
) -> list[Step | Exception]:
    """The guarded step of each work, or what it raised; up to rounding, what `guarded_step` gives for it alone.

    Those that need only the frozen pass share one, whatever their adapters, and with it the others that are to tell the
    frozen logits. Clients of a `Joint` adapter with equal hyper-parameters share theirs. All others are taken one by
    one.

    Args:
        model: the frozen model.
        works: one for each client, no client twice.
        passes: what runs the network for `Joint` adapters; torch by default.
        influence: as in `guarded_step`.
    """
    checked = [attempt(partial(_checked, model, work)) for work in works]
    sound = {i: work for i, work in enumerate(checked) if isinstance(work, Work)}
    frames = {i: Frames.of(work.x, repeated=work.repeated, without_noise=influence > 0) for i, work in sound.items()}
    folding = {i: replace(work, x=frames[i].of_step(work.x)) for i, work in sound.items() if frames[i].folded}
    frozen = _frozen_passes(model, folding)
    joint = _joint_steps(model, folding, passes)

    def take(i: int) -> Step:
        work = folding[i]
        pass_of = _once(lambda: frozen[i] if i in frozen else model.frozen(work.x))
        step = guard(lambda: _step(model, work, pass_of, joint.get(i), passes), work.state, lambda: pass_of().logits)
        step = limited(work.adapter, model, work.state, step, rows=len(work.x), influence=influence)
        missing = work.compare and step.frozen_logits is None
        return replace(step, frozen_logits=pass_of().logits) if missing else step

    def answer(i: int, work: Work) -> Step:
        return frames[i].answer(work.adapter, model, work.state, work.x, partial(take, i))

    return [attempt(partial(answer, i, work)) if isinstance(work, Work) else work for i, work in enumerate(checked)]


def guarded_slices(model: FrozenModel, work: Work, influence: float = 0.0) -> Generator[None, None, Step | Exception]:
    """The guarded step of one work, or what it raised, in the slices that its adapter has."""
    checked = attempt(partial(_checked, model, work))
    if isinstance(checked, Exception):
        return checked
    frames = Frames.of(checked.x, without_noise=influence > 0)
    if frames.folded:
        try:
            step = yield from slices(checked.adapter, model, checked.state, frames.of_step(checked.x))
        except Exception as error:
            checked = replace(checked, taken=error)
        else:
            checked = replace(checked, taken=step)
    (guarded,) = guarded_steps(model, [checked], influence=influence)
    return guarded


def attempt(work: Callable[[], T]) -> T | Exception:
    """What the work gives, or what it raises."""
    try:
        return work()
    except Exception as error:
        return error


def _checked(model: FrozenModel, work: Work) -> Work:
    return replace(work, x=model.batch(work.x))


def _step(
    model: FrozenModel, work: Work, pass_of: Callable[[], Pass], merged: Step | None, passes: Passes | None
) -> Step:
    if work.taken is not None:
        if isinstance(work.taken, Exception):
            raise work.taken
        return work.taken
    match work.adapter:
        case Joint() as adapter:
            return merged if merged is not None else adapter.step_many(model, [work.state], [work.x], passes)[0]
        case FrozenOnly() as adapter:
            return adapter.on_frozen(model, work.state, pass_of())
        case adapter:
            return adapter.step(model, work.state, work.x)


def _frozen_passes(model: FrozenModel, works: Mapping[int, Work]) -> dict[int, Pass]:
    """The frozen passes that several works can share; none of those whose shared pass fails."""
    merging = {i: work for i, work in works.items() if mergeable(work.adapter, model)}
    wanted = [i for i, work in merging.items() if work.compare or isinstance(work.adapter, FrozenOnly)]
    found: dict[int, Pass] = {}
    for places in _alike(wanted, lambda i: works[i].x.shape[1:]):
        merged = attempt(partial(_frozen_pass, model, [works[i].x for i in places]))
        if isinstance(merged, list):
            found |= zip(places, merged, strict=True)
    return found


def _joint_steps(model: FrozenModel, works: Mapping[int, Work], passes: Passes | None) -> dict[int, Step]:
    """The steps of `Joint` adapters that several works share; none of those whose shared step fails for somebody."""
    adapters = {i: work.adapter for i, work in works.items() if isinstance(work.adapter, Joint) and not model.skipped}
    found: dict[int, Step] = {}
    for places in _alike(adapters, lambda i: (adapters[i], works[i].x.shape[1:])):
        states, batches = [works[i].state for i in places], [works[i].x for i in places]
        steps = attempt(partial(adapters[places[0]].step_many, model, states, batches, passes))
        # what overflows for one client is NaN for the others, whose sums it enters with a weight of 0
        if isinstance(steps, list) and all(finite(step.state) for step in steps):
            found |= zip(places, steps, strict=True)
    return found


def _alike(places: Iterable[int], key: Callable[[int], Hashable]) -> list[Places]:
    """The places in groups of equal keys, without those that are alone."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in places:
        groups[key(i)].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _frozen_pass(model: FrozenModel, batches: Sequence[Tensor]) -> list[Pass]:
    """The part of each batch [B, C, H, W] in one pass. On a CPU any number of rows runs as it is: none is filled up."""
    merged, sizes = model.frozen(torch.cat(list(batches))), [len(x) for x in batches]
    return list(map(Pass, torch.split(merged.features, sizes), torch.split(merged.logits, sizes)))


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """Make something when it is first asked for, and once."""
    made: list[T] = []

    def get() -> T:
        if not made:
            made.append(make())
        return made[0]

    return get
