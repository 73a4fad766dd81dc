"""What a session tells of itself while it works."""

from typing import Literal, Protocol, TypeAlias

Way: TypeAlias = Literal["full", "delta"]


class Observer(Protocol):
    """Told of each event once, as it happens, on the event loop: it must be quick and must not raise."""

    def found(self, status: str) -> None:
        """A request got the state it starts from; `status` is one of `Status`, "warm" if it was in memory."""

    def wrote(self, way: Way, result: str) -> None:
        """Redis answered a write of the whole state ("full") or of a batch ("delta").

        Args:
            way: which.
            result: name of the outcome's class in lower case, such as "committed", "appended" or "conflict".
        """

    def opened(self, stolen: bool) -> None:
        """The journal was opened for writing; `stolen`: from a replica that did not let it go in time."""

    def replayed(self, entries: int, seconds: float) -> None:
        """Entries of the journal were read and computed again."""

    def snapshot(self, taken: bool, nbytes: int) -> None:
        """A snapshot was attempted; `nbytes` were written if it was taken, else it is 0."""

    def engine_changed(self) -> None:
        """An entry is computed again by another engine than the one that computed it first."""


class Silent(Observer):
    """Does nothing."""
