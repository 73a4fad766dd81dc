"""What can go wrong between the service and Redis."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

Effect: TypeAlias = Literal[False, "unknown"]
"""Whether a change that was not confirmed may still be, or become, part of the client's history."""


class StateError(Exception):
    """Root of this room's errors. `committed` is False, or "unknown" where the change may still land."""

    def __init__(self, detail: str, committed: Effect = False) -> None:
        super().__init__(detail)
        self.committed = committed


class StoreUnavailable(StateError):
    """Redis did not answer, or cannot take changes at present."""


class StoreFull(StateError):
    """Redis reached its `maxmemory` and refused a script that needs more."""


class StateCorrupt(StateError):
    """A stored state failed its verification; only a reset or a DELETE helps."""


class StoreUnfit(StateError):
    """This Redis would lose state that was acknowledged; `problems` lists every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("this Redis cannot keep client state safely: " + "; ".join(problems))
        self.problems = tuple(problems)
