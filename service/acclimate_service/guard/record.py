"""What a client's rows were predicted as, with and without adaptation, until somebody tells what they were."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from acclimate_service.guard.evidence import Answer, Counts

ROWS: Final = 2048
"""Rows that are remembered; the oldest batches go first."""
MOST_QUESTIONS: Final = 128
"""Batches of which a client has open questions; for a further one, those of the oldest expire."""
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


class Question(NamedTuple):
    """Rows of one batch whose labels are asked for, in order of worth, and not yet told."""

    request_id: str
    rows: tuple[int, ...]


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
        questions: those that are open, the newest last. A question goes when its rows do, or their labels come.
        unspent: labels that may still be asked for; a fraction counts towards the next one. None: nobody counted yet.
    """

    batches: bytes = field(default=b"", repr=False)
    rows: NDArray[np.int16] = field(default_factory=lambda: _NO_ROWS, repr=False, compare=False)
    counts: Counts = field(default_factory=Counts)
    answering: Answer = "adapted"
    born: bytes = b""
    questions: tuple[Question, ...] = ()
    unspent: float | None = None

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
        batches = rows = 0  # that have to go
        for _, size in _BATCH.iter_unpack(self.batches):
            if self.rows.shape[1] - rows + len(frozen) <= ROWS:
                break
            batches, rows = batches + 1, rows + size
        kept = self.rows[:, rows:]
        if len(kept) != len(new):
            height = max(len(kept), len(new))
            kept, new = _with_arms(kept, height), _with_arms(new, height)
        gone, questions = self.batches[: batches * _BATCH.size], self.questions
        if gone and questions:
            forgotten = {each for each, _ in _BATCH.iter_unpack(gone)}
            questions = tuple(each for each in questions if _digest(each.request_id) not in forgotten)
        return replace(
            self,
            batches=self.batches[len(gone) :] + _BATCH.pack(digest, len(frozen)),
            rows=np.concatenate((kept, new), axis=1),
            answering=answering,
            born=self.born or digest,
            questions=questions,
        )

    def ask(
        self, request_id: str, share: float, *, wanted: bool = True, rivals: tuple[int, int] | None = None
    ) -> tuple["Record", tuple[int, ...]]:
        """Ask for labels of the newest batch, within a budget: of rows in which the answers in play differ.

        Of such a row each label tells something, and of others none does. So many are asked as the budget has by now,
        which each batch brings a share of its rows. What is not spent is kept, as far as it is no more than all rows
        that are remembered bring. The budget begins with a lot u from 0 to 1, so that clients of few rows are asked
        too: of n rows at most the whole part of u + share n, which is share n on average. So all clients together need
        no budget of their own: C clients of N rows are asked for share N labels on average at most, and for more than
        share N + sqrt(C ln(1 / d) / 2) with a chance of d at most (Hoeffding, 1963).

        Rows are drawn by lots that are made from request ids: a batch that is computed again asks the same.

        Args:
            request_id: of that batch.
            share: of all rows, 0..1, that may be asked for.
            wanted: whether a label would decide anything; else the budget is kept.
            rivals: two arms, 0 for the frozen model; rows in which these differ are worth more than others.

        Returns:
            The record that knows of the question, and the places in the batch: by worth, and then by their lots.
        """
        digest, size = _BATCH.unpack_from(self.batches, len(self.batches) - _BATCH.size)
        unspent = _generator(digest).random() if self.unspent is None else self.unspent
        unspent = min(unspent + share * size, most_asked(share))
        asked: tuple[int, ...] = ()
        if wanted and unspent >= 1:
            answers = np.delete(self.rows[:, -size:], _LABEL, axis=0)
            if len(places := np.flatnonzero((answers != answers[0]).any(axis=0))):
                places = _generator(digest).permutation(places)
                if rivals is not None:
                    one, other = (answers[arm + 1 if arm else 0] for arm in rivals)
                    places = places[np.argsort((one == other)[places], kind="stable")]
                asked = tuple(places[: int(unspent)].tolist())
        questions = (*self.questions, Question(request_id, asked))[-MOST_QUESTIONS:] if asked else self.questions
        return replace(self, questions=questions, unspent=unspent - len(asked)), asked

    def open_questions(self) -> Iterator[tuple[Question, int]]:
        """Those that are open, the newest first, and how many further rows there is room for before each expires."""
        sizes, left = dict[bytes, int](), ROWS
        for digest, size in reversed([*_BATCH.iter_unpack(self.batches)]):
            left -= size
            sizes.setdefault(digest, max(0, left))
        for question in reversed(self.questions):
            yield question, sizes[_digest(question.request_id)]

    def labels_of(self, request_id: str) -> list[int]:
        """The labels of a batch that is remembered, -1 where none was told; empty if it is not remembered."""
        wanted, first = _digest(request_id), 0
        for digest, size in _BATCH.iter_unpack(self.batches):
            if digest == wanted:
                labels: list[int] = self.rows[_LABEL, first : first + size].tolist()
                return labels
            first += size
        return []

    def tell(self, labels: Iterable[Label]) -> tuple["Record", Tally]:
        """Count what labels say; each row counts once."""
        starts, first = dict[bytes, tuple[int, int]](), 0
        for digest, size in _BATCH.iter_unpack(self.batches):
            starts[digest] = first, size
            first += size
        rows, counts, tally = self.rows.copy(), self.counts, Tally()
        questions = {each.request_id: each.rows for each in self.questions}
        for each in labels:
            start, size = starts.get(_digest(each.request_id), (0, 0))
            if not 0 <= each.row < size:
                tally = replace(tally, unknown=tally.unknown + 1)
                continue
            frozen, adapted, known = rows[: len(_NO_ROWS), start + each.row].tolist()
            if known == _UNTOLD:
                rows[_LABEL, start + each.row] = each.label
                left = questions.get(each.request_id, ())
                counts += Counts.of(frozen, adapted, each.label, asked=each.row in left)
                if each.row in left:
                    questions[each.request_id] = tuple(row for row in left if row != each.row)
                tally = replace(tally, counted=tally.counted + 1)
            elif known == each.label:
                tally = replace(tally, duplicate=tally.duplicate + 1)
            else:
                tally = replace(tally, contradicting=tally.contradicting + 1)
        still_open = tuple(Question(request_id, left) for request_id, left in questions.items() if left)
        return replace(self, rows=rows, counts=counts, questions=still_open), tally

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
        asked = orjson.dumps([self.unspent, self.questions, c.kinds], default=tuple)
        return b"".join((header, self.born.ljust(_ID_BYTES, b"\0"), self.batches, rows, asked))

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
            height, length = (
                len(_NO_ROWS) + (flags >> _ARMS_SHIFT),
                sum(size for _, size in _BATCH.iter_unpack(batches)),
            )
            rows = np.frombuffer(data, "<i2", height * length, end).reshape(height, length)
            unspent, asked, kinds = orjson.loads(data[end + rows.nbytes :] or b"[null,[],null]")  # older ones end here
        except struct.error as error:
            raise ValueError(f"these bytes are no record: {error}") from error
        questions = tuple(Question(request_id, tuple(places)) for request_id, places in asked)
        answering: Answer = "frozen" if flags & 1 else "adapted"
        counts = Counts(*numbers) if kinds is None else Counts.of_kinds(kinds)
        return cls(batches, rows, counts, answering, born, questions, unspent)


def most_asked(share: float) -> float:
    """Labels that a client can be asked for at once: what the rows that are remembered bring, and one at least."""
    return max(1.0, share * ROWS)


def _with_arms(rows: NDArray[np.int16], height: int) -> NDArray[np.int16]:
    """Rows [3 + A, N] with as many arms as this height has; those they lack predicted what the frozen model did."""
    return np.concatenate((rows, np.broadcast_to(rows[:1], (height - len(rows), rows.shape[1]))))


def _generator(digest: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _digest(request_id: str) -> bytes:
    return blake2b(request_id.encode(), digest_size=_ID_BYTES).digest()
