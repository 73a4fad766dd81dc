"""What callers of a history asked for, and what they were told."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from acclimate_service.state import Applied, Looked, Request

Fate: TypeAlias = Literal["acknowledged", "refused", "unknown"]


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


@dataclass
class Op:
    """What a caller wants done once: every call of it carries the same key and content."""

    kind: Literal["predict", "reset"]
    model: str
    content: bytes  # payload of a batch; new configuration of a reset, or nothing
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
    def models(self) -> set[str]:
        """Where it may have been applied."""
        return {call.model for call in self.calls}

    @property
    def uncertain(self) -> bool:
        """Whether it may have been applied without anybody having been told."""
        return not self.applied and any(call.fate == "unknown" for call in self.calls)


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
