"""What callers of a history asked for, and what they were told."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from checker.toy import ToyState

from acclimate_service.state import Applied, Looked, OutOfOrder, Paused, Request

Fate: TypeAlias = Literal["acknowledged", "refused", "unknown"]
Kind: TypeAlias = Literal["predict", "reset", "rework", "pause", "rollback"]


@dataclass
class Call:
    """One request as its caller saw it: when, where, and what became of it."""

    model: str
    replica: str
    start: float
    end: float
    fate: Fate
    applied: Applied | None
    error: BaseException | None

    @property
    def paused(self) -> bool:
        """Whether it was turned away because the client was paused."""
        return isinstance(self.error, Paused)

    @property
    def late(self) -> bool:
        """Whether it was turned away because of its number."""
        return isinstance(self.error, OutOfOrder)


@dataclass
class Op:
    """What a caller wants done once: every call of it carries the same key and content."""

    kind: Kind
    model: str
    content: (
        bytes  # payload of a batch, or of a change of the whole state; configuration of a reset, or nothing; a flag
    )
    request: Request
    calls: list[Call] = field(default_factory=list)

    @property
    def start(self) -> float:
        return min(call.start for call in self.calls)

    @property
    def acknowledged(self) -> float:
        """When the caller first knew that it was applied."""
        return min(call.end for call in self.calls if call.applied)

    @property
    def applied(self) -> list[Applied]:
        return [call.applied for call in self.calls if call.applied]

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def models(self) -> set[str]:
        """Where it may have been applied without anybody having been told."""
        if self.applied:
            return set()
        return {call.model for call in self.calls if call.fate == "unknown" and not self._settled(call)}

    def _settled(self, call: Call) -> bool:
        """Whether it was turned away as late afterwards: had this call been applied, it would have been repeated."""
        late = [later for later in self.calls if later.late and later.fate == "refused"]
        return any(later.model == call.model and later.start >= call.end for later in late)


@dataclass(frozen=True)
class Read:
    """A state that a reader was shown."""

    model: str
    start: float
    end: float
    life: str
    seq: int
    state: ToyState


@dataclass
class Deletion:
    start: float
    end: float
    fate: Fate


@dataclass
class Ending:
    """What is durable in the end, by model: version and answer to the probe."""

    life: str
    seen: dict[str, Looked]
    problems: list[str]
