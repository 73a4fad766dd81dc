"""Documents about labels: what they say of clients and adapters, and for which rows they are asked."""

from typing import Annotated, Any, Literal

from pydantic import Field

from acclimate_service.http.schemas.common import Absent, Change, Count, Document, ModelName, Probability, Verdict


class Interval(Document):
    """An accuracy over all rows between bounds; null where no label is known, or nobody told one unasked."""

    accuracy: Probability | None
    low: Probability | None
    high: Probability | None


class Evidence(Document):
    """What labels show."""

    verdict: Verdict
    labelled: Count
    asked: Annotated[int, Field(ge=0, description="Rows among those whose labels were asked for.")]
    wins: Annotated[int, Field(ge=0, description="Rows that only the adapted prediction has right.")]
    losses: Annotated[int, Field(ge=0, description="Rows that only the frozen prediction has right.")]
    frozen: Interval
    adapted: Interval


class Guard(Evidence):
    """What a client's labels show, and which model answers it."""

    answering: Literal["adapted", "frozen"]
    because: str


class ToldRows(Document):
    """What became of labelled rows."""

    counted: Count
    duplicate: Count
    contradicting: Count
    unknown: Count


class Feedback(Change):
    """What labels changed."""

    feedback: Absent[ToldRows] = None
    guard: Absent[Guard] = None


class OpenQuestion(Document):
    """Rows of one answer whose labels are asked for, and not told yet."""

    request_id: Annotated[str, Field(description="Of the answer.")]
    rows: Annotated[list[Count], Field(min_length=1, description="Places in the batch, in order of worth.")]


class ClientQuestion(OpenQuestion):
    """A question, and how long it stays open."""

    expires_in_rows: Annotated[int, Field(ge=0, description="Further rows of the client that leave it open.")]


class ClientAsks(Document):
    """The open questions of a client, the newest first."""

    client_id: str
    model: ModelName
    asks: list[ClientQuestion]
    expires_in_s: Annotated[int, Field(ge=0, description="Until they expire, if the client sends nothing more.")]


class AskedClient(Document):
    """What one of many clients is asked, the newest questions first."""

    client_id: str
    asks: list[OpenQuestion]
    expires_in_s: Annotated[int, Field(ge=0, description="Until they expire, if the client sends nothing more.")]


class Asks(Document):
    """Clients that are asked something, those first whose questions changed last."""

    model: ModelName
    clients: list[AskedClient]
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class LastImage(Document):
    """One image that a client sent."""

    request_id: str
    row: Count
    predicted: Annotated[str, Field(description="Class that was answered.")]
    asked: Annotated[bool, Field(description="Whether its label is asked for.")]
    label: Annotated[str | None, Field(description="Its label, if one was told.")]
    png: Annotated[str | None, Field(description="PNG, base64; null where there are neither 1 nor 3 channels.")]


class LastImages(Document):
    """The last images of a client that a replica has, the newest first."""

    client_id: str
    model: ModelName
    images: list[LastImage]


class AdapterEvidence(Document):
    """What the labels of all clients show of one configuration."""

    adapter: str
    hyperparameters: dict[str, Any]
    clients: Count
    candidate: bool
    guard: Evidence


class ModelEvidence(Document):
    """What the labels of all clients show of each configuration."""

    model: ModelName
    policy: Literal["adapt", "frozen", "follow-fleet"]
    adapters: list[AdapterEvidence]
