"""A window over the last rows of a stream, as a state holds it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Ring(NamedTuple):
    """The last rows of a stream; `buffer[i % window]` holds row i."""

    buffer: Tensor  # [window, width], or [window]
    seen: Tensor  # int64 scalar, rows so far

    def push(self, rows: Tensor) -> "Ring":
        """The ring after more rows [B, width] or [B]; this one stays as it is."""
        window = len(self.buffer)
        latest = rows[-window:]
        seen = int(self.seen) + len(rows)
        places = torch.arange(seen - len(latest), seen, device=rows.device) % window
        return Ring(self.buffer.to(rows).index_copy(0, places, latest), torch.tensor(seen))

    def latest(self, number: int) -> Tensor:
        """The last rows, in the order in which they came."""
        seen = int(self.seen)
        places = torch.arange(seen - number, seen, device=self.buffer.device) % len(self.buffer)
        return self.buffer[places]

    def rows(self) -> Tensor:
        """The rows held, in no particular order."""
        return self.buffer[: int(self.seen)]
