"""Documents about clients: one, many, what is stored of them, and how it came about."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from acclimate_service.http.schemas.common import (
    Absent,
    Adaptation,
    Committed,
    Count,
    Document,
    Durability,
    ModelName,
    Probability,
    Verdict,
)
from acclimate_service.http.schemas.labels import Guard


class KeptState(Document):
    """An earlier state that can be gone back to."""

    version: Count
    at: datetime
    bytes: Count


class StoredState(Document):
    """A client's state, where it is and how large."""

    version: Count
    status: Literal["reset", "warm", "restored"]
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory that the client takes, as Redis counts it.")]
    tier: Literal["memory", "redis"]
    base: Annotated[int, Field(ge=0, description="Version of the newest complete copy.")]
    base_bytes: Annotated[int, Field(ge=0, description="Of that copy; 0 where there is none yet.")]
    journal_entries: Count
    journal_bytes: Count
    owner: str | None
    expires_in_s: int
    kept: list[KeptState]
    durability: Durability


class Client(Document):
    """A client as it is stored."""

    client_id: str
    model: ModelName
    adapter: str
    hyperparameters: dict[str, Any]
    adaptation: Adaptation
    state: StoredState
    guard: Guard | None


class ListedClient(Document):
    """A client among others."""

    client_id: str
    adapter: str
    hyperparameters: dict[str, Any]
    adaptation: Adaptation
    version: Count
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory that it takes, as Redis counts it.")]
    changed_at: Annotated[datetime | None, Field(description="Its last change, of which batches are the most.")]
    shift: Annotated[
        float | None, Field(description="`shift` of its latest batch, where its adapter measures one and it is noted.")
    ]
    agreement: Annotated[
        Probability | None,
        Field(description="Share of the images of its latest batch on which adapted and frozen predictions agree."),
    ]
    labelled: Annotated[Count | None, Field(description="Rows with a label.")]
    gain: Annotated[
        Annotated[float, Field(ge=-1, le=1)] | None,
        Field(description="Wins less losses, of these rows: what adapting it brings in accuracy; null without labels."),
    ]
    verdict: Annotated[
        Verdict | None,
        Field(description="What its labels show; null where nobody compares, or not under this version."),
    ]


class Usage(Document):
    """What all clients of the caller take, as they were counted last, and the most that they may."""

    clients: Count
    most_clients: Count
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory.")]
    most_bytes: Annotated[Count | None, Field(description="Null for any number.")]


class Clients(Document):
    """Some of the clients that have a state."""

    model: ModelName
    clients: list[ListedClient]
    usage: Usage
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class FailedClient(Document):
    """A client of several for which it was not done, and why, as a problem says it."""

    client_id: str
    code: str
    detail: str
    state_committed: Committed


class DeletedClients(Document):
    """A page of clients that were to be removed."""

    model: ModelName
    deleted: list[str]
    failed: Annotated[list[FailedClient], Field(description="Those that are, or may be, there still.")]
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class ExportedState(Document):
    """A client and its state."""

    client_id: str
    adapter: str
    hyperparameters: dict[str, Any]
    version: Count
    state: Annotated[str, Field(description="As `GET .../state` gives it, in base64.")]


class ExportedPage(Document):
    """The last line: how many states came, and how many did not."""

    exported: Count
    failed: Count
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class TimelinePoint(Document):
    """One batch, the mean of several in a row, or something else that befell a client."""

    version: Annotated[Count, Field(description="Of the state, after the last of it.")]
    at: Annotated[datetime, Field(description="When that was stored.")]
    batches: Annotated[Count, Field(description="0 for what is no batch.")]
    images: Count
    signals: Annotated[
        dict[str, float],
        Field(
            description="Means of what the adapter measured, of `agreement`, the share of images on which adapted and "
            "frozen predictions agree, and of `frozen`, the share of batches that the frozen model answered."
        ),
    ]
    prior: Annotated[Absent[list[Probability]], Field(description="Estimated share of each class.")] = None
    modules: Annotated[
        Absent[dict[str, Annotated[float, Field(ge=0)]]],
        Field(description="How far modules have moved, relative to their size; of one batch in 8."),
    ] = None
    events: Annotated[dict[str, Count], Field(description="What else befell the client, and how often.")]
    verdict: Absent[Verdict] = None
    taken_over_from: Annotated[Absent[str], Field(description="Replica that had the client before.")] = None


class Timeline(Document):
    """What became of a client, the oldest first; the older, the coarser."""

    client_id: str
    model: ModelName
    classes: list[str]
    training_prior: Annotated[list[Probability] | None, Field(description="Of the model; null if it has none.")]
    points: list[TimelinePoint]
