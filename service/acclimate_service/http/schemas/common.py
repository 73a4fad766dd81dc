"""What many documents have: kinds of members, a problem, and what replies to requests of a client have in common."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
_Unknown: TypeAlias = Annotated[Literal["unknown"], WithJsonSchema({"type": "string", "enum": ["unknown"]})]
Committed = TypeAliasType("Committed", bool | _Unknown)
"""As an enumeration: openapi-python-client takes every truth value for a constant beside it, and refuses it."""
Adaptation: TypeAlias = Literal["running", "paused"]
T = TypeVar("T")
Absent: TypeAlias = T | SkipJsonSchema[None]
"""Of a member that may be left out, and is never null."""
Durability: TypeAlias = Literal["always", "everysec", "none", "unknown"]
AdapterName: TypeAlias = Annotated[
    str, Field(max_length=64, json_schema_extra={"pattern": r"^[a-z0-9_]+(\+[a-z0-9_]+)*$", "example": "atp"})
]
Verdict: TypeAlias = Literal["trusted", "undecided", "harmful"]


class Document(BaseModel):
    """A JSON object without further members."""

    model_config = ConfigDict(extra="forbid")


# problems


class Problem(Document):
    """Why a request was not answered (RFC 9457)."""

    type: Literal["about:blank"]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: Annotated[str, Field(description="What was wrong and what is accepted, for people.")]
    code: Annotated[str, Field(description="Stable, for programs. There may be more of them in later versions.")]
    retryable: Annotated[bool, Field(description="Whether the same request may succeed later.")]
    state_committed: Annotated[Committed, Field(description="Whether the client's state changed all the same.")]
    request_id: str
    error: Annotated[str, Field(description="Repeats `detail`.")]


# what replies have in common


class ModelName(Document):
    """Name and version of a model."""

    name: str
    version: str


class State(Document):
    """What became of the client's state."""

    version: Annotated[int, Field(ge=0, description="Changes applied to the client's state so far.")]
    status: Literal["cold", "warm", "restored", "reset", "rolled_back", "guarded", "frozen"]
    committed: Annotated[Committed, Field(description="Whether this request changed the state.")]
    replayed: Literal["none", "stored", "recomputed", "unavailable"]
    durability: Durability
    lost: Annotated[int, Field(ge=0, description="Acknowledged versions that Redis lost.")] = 0
    skipped: Annotated[bool, Field(description="Whether images of the batch tell nothing.")] = False
    adaptation: Adaptation = "running"


class PredictedClass(Document):
    """The predicted class of one image."""

    index: Count
    label: str
    probability: Probability


class GuardDecision(Document):
    """Which model answered, where that is not the adapted one, or was another one before."""

    answering: Literal["adapted", "frozen"]
    because: str
    switched: bool


Signals: TypeAlias = dict[str, float | list[float]]


class Reply(Document):
    """What all replies to requests of a client have."""

    client_id: str
    model: ModelName
    adapter: str
    state: State
    request_id: Annotated[str, Field(description="Of the request; of a repeated one, that of the first.")]
    key_expires_at_earliest: Annotated[
        Absent[datetime], Field(description="Until then at least the Idempotency-Key is remembered.")
    ] = None


class Prediction(Reply):
    """The answer to a batch; without predictions where `state.replayed` is `unavailable`."""

    predictions: list[PredictedClass]
    signals: Annotated[Signals, Field(description="Label-free measurements of the adapter.")]
    probabilities: Annotated[
        Absent[list[list[Probability]]], Field(description="The posterior of every image, if it was asked for.")
    ] = None
    guard: Absent[GuardDecision] = None
    ask: Annotated[Absent[list[Count]], Field(description="Rows that are worth a label, in order of worth.")] = None


class Change(Reply):
    """A client that was reset, or given a state; what its other replies have, is gone of an answer too old."""

    predictions: Annotated[list[PredictedClass], Field(max_length=0)] = []
    signals: Annotated[Signals, Field(max_length=0)] = {}


class Enrolment(Change):
    """A client that restarted from labelled images."""

    enrolled: Annotated[Absent[int], Field(description="How many.")] = None


class Rollback(Change):
    """A client that went back to an earlier state."""

    restored: Annotated[Absent[int], Field(description="The version of that state.")] = None


class Configured(Change):
    """A client and the adapter that it has now."""

    hyperparameters: Absent[dict[str, Any]] = None
    adaptation: Absent[Adaptation] = None
    changed: Absent[bool] = None
