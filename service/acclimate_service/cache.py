"""States of recent clients in memory, bounded by bytes."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from acclimate_adapters import State
from acclimate_service.state import Basis

_OVERHEAD = 1024  # bytes an entry takes beside its tensors, so that states without any are bounded too


@dataclass(frozen=True, slots=True)
class Entry:
    """A client's state and the point of its history that it stands for."""

    basis: Basis
    configuration: str
    state: State
    touched: float  # monotonic seconds of the last script that extended the state's life in Redis

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.state.nbytes + _OVERHEAD


class StateCache:
    """Least recently used out first. Entries are copies of what Redis holds: dropping one loses nothing."""

    def __init__(self, budget: int) -> None:
        """Keep at most `budget` bytes."""
        self._budget = budget
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str, younger_than: float = -math.inf) -> Entry | None:
        """The entry of a client, unless it was last touched before `younger_than` (monotonic seconds)."""
        entry = self._entries.get(key)
        if entry is None or entry.touched < younger_than:
            return None
        self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry, and let go of the oldest ones beyond the budget."""
        self.drop(key)
        if entry.nbytes > self._budget:
            return
        self._entries[key] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self._budget:
            self.drop(next(iter(self._entries)))

    def drop(self, key: str) -> None:
        """Forget a client."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
