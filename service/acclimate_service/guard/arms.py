"""What the labels of all clients say of the arms of portfolios."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from acclimate_service.guard.fleet import Heard
from acclimate_service.guard.pools import Pools
from acclimate_service.metrics import Background

Shares: TypeAlias = tuple[float, ...]
"""What share of the rows that count each arm has right, the frozen model first."""
_TASK: Final = "arms"


@dataclass(frozen=True, slots=True)
class Rows:
    """Labelled rows by which arms were right, as the adapter counts them."""

    kinds: tuple[int, ...]

    @property
    def labelled(self) -> int:
        """All of them."""
        return sum(self.kinds)

    @classmethod
    def of_kinds(cls, kinds: Sequence[int]) -> Self:
        """Those of which there are so many of each kind."""
        return cls(tuple(kinds))


class Arms(Heard[Rows]):
    """The fleet's shares of right answers, by configuration.

    Attributes:
        latest: those heard last. Whoever takes a step of a portfolio has them kept fresh, nobody else.

    Args:
        pools: where the replicas keep the rows; as for the guard, a client counts with a few of them.
        background: watches over what nobody waits for.
        shares: what the adapter of a configuration makes of the rows of all clients, by kind.
    """

    def __init__(
        self, pools: Pools[Rows], background: Background, shares: Callable[[str, Sequence[int]], Shares]
    ) -> None:
        super().__init__(pools, background, _TASK)
        self._of = shares
        self.latest: Mapping[str, Shares] = {}

    def understand(self, counted: Mapping[str, tuple[Rows, ...]]) -> None:
        """Add up the rows of all clients, as `Heard.understand`."""
        sums = {
            name: [sum(kind) for kind in zip(*(each.kinds for each in clients), strict=True)]
            for name, clients in counted.items()
        }
        self.latest = {name: self._of(name, rows) for name, rows in sums.items()}
