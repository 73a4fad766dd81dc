"""What a run of histories is like: how often what happens, and which safeguard is taken away."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checker.faults import RATES

from acclimate_service.state import Applied, Batch, Request, Session


async def apply(session: Session[Any], request: Request, batch: Batch) -> Applied:
    return await session.apply(request, batch, while_paused=False)


@dataclass(frozen=True)
class Edit:
    """A change of one script: `old` is replaced by `new`."""

    script: str
    old: str
    new: str = ""


@dataclass(frozen=True)
class Patch:
    """A change of the flow: an attribute of a class or module is replaced."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Profile:
    """How histories differ from each other.

    Args:
        rates: of the faults of the call layer, per exchange.
        failing_steps, failing_snapshots: per step, per serialisation.
        unequal, second_model: per history: thresholds differ and a journal may be off; two models share the client.
        affinity: per call: it goes to the history's home replica.
        switches: per call, where there are two models: it goes to either.
        duplicates, resets, reworks, pauses, rollbacks, deletes, drops, reads, jumps: weights of these actions.
        impatient: per call: its caller gives up if it has not begun within milliseconds.
        tiny_budget: per history: no replica has room for a state in memory.
        numbered: per batch: its caller numbers it.
        size: how states grow, a name of `SIZES`; any if empty.
        limits: in the place of the scaled-down ones.
        edits, patches: the safeguard that is taken away.
        apply: how a replica applies a batch.
    """

    rates: Mapping[str, float] = field(default_factory=lambda: RATES)
    failing_steps: float = 0.02
    failing_snapshots: float = 0.1
    unequal: float = 1 / 3
    second_model: float = 1 / 5
    affinity: float = 0.5
    switches: float = 0.2
    duplicates: float = 1.0
    resets: float = 1.0
    reworks: float = 1.0
    pauses: float = 1.0
    rollbacks: float = 1.0
    deletes: float = 1.0
    drops: float = 1.0
    reads: float = 1.0
    jumps: float = 1.0
    impatient: float = 0.15
    tiny_budget: float = 1 / 3
    numbered: float = 1 / 3
    size: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = ()
    apply: Callable[[Session[Any], Request, Batch], Awaitable[Applied]] = apply
