"""What a client's rows were predicted as, with and without adaptation, until somebody tells what they were."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from acclimate_service.guard.evidence import Answer, Counts

ROWS: Final = 2048
"""Rows that are remembered; the oldest batches go first."""
_LABEL: Final = 2
"""Where the labels stand among the numbers of a row."""
_UNTOLD: Final = -1
_ID_BYTES: Final = 8
_HEADER: Final = struct.Struct("<5QBI")
_BATCH: Final = struct.Struct(f"<{_ID_BYTES}sI")
_NO_ROWS: Final = np.zeros((3, 0), np.int16)
_ARMS_SHIFT: Final = 1
"""Where the number of arms stands beside the flag that the frozen model answers."""


@dataclass(frozen=True, slots=True)
class Label:
    """What one row of an earlier answer was: id of its request, place in the batch, and class."""

    request_id: str
    row: int
    label: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of labels.

    Args:
        counted: of rows whose label was not known.
        duplicate: of rows that had this label already.
        contradicting: of rows that had another label, which stays.
        unknown: of rows that are not remembered.
    """

    counted: int = 0
    duplicate: int = 0
    contradicting: int = 0
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """The last rows of a client, and the evidence of all that were labelled.

    Args:
        batches: of each batch remembered, the oldest first, the digest of its request and its number of rows, packed:
            with one image per batch there are thousands, and each commit writes them all.
        rows: [3 + A, N] int16, their frozen class, adapted class, label (-1 where it is not known), and the class that
            each of A arms predicted.
        counts: of all labelled rows, also of those no longer remembered.
        answering: which prediction the last batch was given.
        born: digest of the first request; tells one record of a client from the next one after a reset.
    """

    batches: bytes = field(default=b"", repr=False)
    rows: NDArray[np.int16] = field(default_factory=lambda: _NO_ROWS, repr=False, compare=False)
    counts: Counts = field(default_factory=Counts)
    answering: Answer = "adapted"
    born: bytes = b""

    def append(
        self,
        request_id: str,
        frozen: Sequence[int],
        adapted: Sequence[int],
        *,
        answering: Answer,
        by_arm: Sequence[Sequence[int]] = (),
    ) -> "Record":
        """Remember a batch, as far as there is room; the newest is always remembered.

        Args:
            request_id: by which its labels will come.
            frozen, adapted: [B], the predicted classes.
            answering: which of them were given.
            by_arm: [B, A], the classes that the arms predicted; without any, they predicted what the frozen model did.
        """
        digest = _digest(request_id)
        new = np.array([frozen, adapted, [_UNTOLD] * len(frozen), *zip(*by_arm, strict=True)], np.int16)
        batches, rows = self._surplus(len(frozen))
        kept = self.rows[:, rows:]
        if len(kept) != len(new):
            height = max(len(kept), len(new))
            kept, new = _with_arms(kept, height), _with_arms(new, height)
        return Record(
            batches=self.batches[batches * _BATCH.size :] + _BATCH.pack(digest, len(frozen)),
            rows=np.concatenate((kept, new), axis=1),
            counts=self.counts,
            answering=answering,
            born=self.born or digest,
        )

    def worth(self, share: float) -> list[int]:
        """Rows of the newest batch that are worth a label: of those in which the answers in play differ.

        Of such a row each label tells something, and of others none does. They are drawn by lot, so that over the rows
        that are remembered a share of them is asked on average: where fewer differ, each is asked likelier. The lots
        are made from the request id: a batch that is computed again asks the same.

        Args:
            share: of all rows, 0..1.

        Returns:
            Their places in the batch, in the order of their lots; rows that none was drawn for are left out.
        """
        answers = np.delete(self.rows, _LABEL, axis=0)
        differing = (answers != answers[0]).any(axis=0)
        if not differing.any():
            return []
        chance = share * len(differing) / int(differing.sum())
        digest, size = _BATCH.unpack_from(self.batches, len(self.batches) - _BATCH.size)
        lots = np.random.default_rng(int.from_bytes(digest, "little")).random(size)
        places = np.flatnonzero(differing[-size:] & (lots < chance))
        drawn: list[int] = places[np.argsort(lots[places])].tolist()
        return drawn

    def tell(self, labels: Iterable[Label]) -> tuple["Record", Tally]:
        """Count what labels say; each row counts once."""
        starts, first = dict[bytes, tuple[int, int]](), 0
        for digest, size in _BATCH.iter_unpack(self.batches):
            starts[digest] = first, size
            first += size
        rows, counts, tally = self.rows.copy(), self.counts, Tally()
        for each in labels:
            start, size = starts.get(_digest(each.request_id), (0, 0))
            if not 0 <= each.row < size:
                tally = replace(tally, unknown=tally.unknown + 1)
                continue
            frozen, adapted, known = rows[: len(_NO_ROWS), start + each.row].tolist()
            if known == _UNTOLD:
                rows[_LABEL, start + each.row] = each.label
                counts += Counts.of(frozen, adapted, each.label)
                tally = replace(tally, counted=tally.counted + 1)
            elif known == each.label:
                tally = replace(tally, duplicate=tally.duplicate + 1)
            else:
                tally = replace(tally, contradicting=tally.contradicting + 1)
        return replace(self, rows=rows, counts=counts), tally

    def told_since(self, before: "Record") -> NDArray[np.int16]:
        """Those `rows` whose labels `tell` counted, when it made this record of the one before; in their order."""
        told: NDArray[np.int16] = self.rows[:, (before.rows[_LABEL] == _UNTOLD) & (self.rows[_LABEL] != _UNTOLD)]
        return told

    def count(self, request_id: str, frozen: Sequence[int], adapted: Sequence[int], labels: Sequence[int]) -> "Record":
        """Count rows whose labels are known when they are predicted; they are not remembered.

        Args:
            request_id: of whoever tells them.
            frozen, adapted, labels: [B], the predicted classes and the true ones.
        """
        rows = zip(frozen, adapted, labels, strict=True)
        counts = sum((Counts.of(*row) for row in rows), self.counts)
        return replace(self, counts=counts, born=self.born or _digest(request_id))

    def to_bytes(self) -> bytes:
        """Serialise; equal records give equal bytes."""
        c = self.counts
        numbers = c.wins, c.losses, c.labelled, c.frozen_right, c.adapted_right
        flags = (self.answering == "frozen") | (len(self.rows) - len(_NO_ROWS)) << _ARMS_SHIFT
        header = _HEADER.pack(*numbers, flags, len(self.batches) // _BATCH.size)
        rows = np.ascontiguousarray(self.rows, "<i2").tobytes()
        return b"".join((header, self.born.ljust(_ID_BYTES, b"\0"), self.batches, rows))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: the bytes are no record.
        """
        try:
            *numbers, flags, length = _HEADER.unpack_from(data)
            start = _HEADER.size + _ID_BYTES
            born = b"" if data[_HEADER.size : start] == bytes(_ID_BYTES) else data[_HEADER.size : start]
            end = start + length * _BATCH.size
            batches = data[start:end]
            if len(batches) != end - start:
                raise ValueError(f"these bytes are no record: {length} batches are cut short")
            shape = len(_NO_ROWS) + (flags >> _ARMS_SHIFT), sum(size for _, size in _BATCH.iter_unpack(batches))
            rows = np.frombuffer(data[end:], "<i2").reshape(shape)
        except struct.error as error:
            raise ValueError(f"these bytes are no record: {error}") from error
        return cls(batches, rows, Counts(*numbers), "frozen" if flags & 1 else "adapted", born)

    def _surplus(self, coming: int) -> tuple[int, int]:
        """How many batches, and rows in them, have to go before so many rows come."""
        batches = rows = 0
        for _, size in _BATCH.iter_unpack(self.batches):
            if self.rows.shape[1] - rows + coming <= ROWS:
                break
            batches, rows = batches + 1, rows + size
        return batches, rows


def _with_arms(rows: NDArray[np.int16], height: int) -> NDArray[np.int16]:
    """Rows [3 + A, N] with as many arms as this height has; those they lack predicted what the frozen model did."""
    return np.concatenate((rows, np.broadcast_to(rows[:1], (height - len(rows), rows.shape[1]))))


def _digest(request_id: str) -> bytes:
    return blake2b(request_id.encode(), digest_size=_ID_BYTES).digest()
