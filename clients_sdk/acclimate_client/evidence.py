"""What true labels say: the rows they are told for, and the evidence whether adaptation helps, as frozen records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

Class: TypeAlias = str | SupportsIndex


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """The true class of one image that was predicted before.

    Args:
        request_id: `request_id` of the prediction; it may have been made by another process.
        row: Position of the image in its batch, 0..B-1.
        label: Class name or class index.

    Raises:
        TypeError, ValueError: One of them cannot be right.
    """

    request_id: str
    row: SupportsIndex
    label: Class

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"request_id is {self.request_id!r}; accepted is the request_id of a prediction")
        if not isinstance(self.row, SupportsIndex):
            raise TypeError(f"row is {self.row!r}; accepted is an int, the image's position in its batch")
        if self.row.__index__() < 0:
            raise ValueError(f"row is {self.row!r}; accepted are 0, the first image of the batch, and more")
        if not isinstance(self.label, str | SupportsIndex):
            raise TypeError(f"label is {self.label!r}; accepted are a class name and a class index")


@dataclass(frozen=True, slots=True)
class Ask:
    """An image that was predicted before, and whose label would tell whether adaptation helps its client.

    Attributes:
        client_id: Whose image.
        request_id: `request_id` of the prediction.
        row: Position of the image in its batch, 0..B-1.
    """

    client_id: str
    request_id: str
    row: int

    def labelled(self, label: Class) -> LabelledRow:
        """Returns the answer, for `feedback` of the client.

        Raises:
            TypeError: The label is neither a class name nor a class index.
        """
        return LabelledRow(self.request_id, self.row, label)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What became of the labelled rows of one call.

    Attributes:
        counted: Rows that are evidence now.
        duplicate: Rows that had this label already.
        contradicting: Rows that have another label, which stays.
        unknown: Rows that are not remembered: never predicted, too long ago, or before a reset.
    """

    counted: int
    duplicate: int
    contradicting: int
    unknown: int


@dataclass(frozen=True, slots=True)
class AccuracyInterval:
    """An accuracy in 0..1 and its bounds, valid however often one looks; each may be None without labelled rows.

    The accuracy is None, too, where all labels were asked for: they say nothing of rows without a difference.
    """

    accuracy: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Labelled rows by which prediction was right, and what follows.

    Attributes:
        verdict: trusted (adaptation helps), harmful or undecided.
        labelled: Rows whose label is known.
        wins: Rows that only the adapted prediction has right.
        losses: Rows that only the frozen prediction has right.
        frozen: Accuracy of the frozen model over all rows; labelled ones are weighted by how they were chosen.
        adapted: That of the adapted predictions.
        asked: Labelled rows whose labels were asked for.
    """

    verdict: str
    labelled: int
    wins: int
    losses: int
    frozen: AccuracyInterval
    adapted: AccuracyInterval
    asked: int = 0


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """Whose predictions a client is given.

    Attributes:
        answering: adapted or frozen.
        because: own_harmful or own_trusted (verdict on the client itself); policy (the operator's choice, for clients
            without such a verdict); fleet_harmful, fleet_behind or fleet_not_behind (labelled rows of all clients).
    """

    answering: str
    because: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of one client: its decision and the client's own evidence."""

    decision: GuardDecision
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class AdapterEvidence:
    """Evidence about one adapter, over all clients that have it.

    Attributes:
        hyperparameters: Those that differ from their defaults.
        clients: Number of clients.
        candidate: Whether it is only tried out, and answers no client.
    """

    adapter: str
    hyperparameters: Mapping[str, Any]
    clients: int
    candidate: bool
    evidence: Evidence
