"""What the server answers about one client, as frozen records. Members that this version does not know are ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acclimate_client.errors import Committed
from acclimate_client.evidence import Guard, GuardDecision, RowCounts
from acclimate_client.models import ModelRef


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What became of the client's state.

    Attributes:
        version: Number of changes applied to the client's state so far.
        status: cold (first batch of this client), warm (in the replica's memory), restored (loaded from Redis),
            reset, rolled_back (Redis lost changes that were acknowledged), frozen (Redis is away, and the
            operator chose that the global model answers meanwhile) or guarded (the global model answers because
            labels or the operator's policy speak for it; see `Prediction.guard`).
        committed: Whether this call changed the state; "unknown" if that could not be told: repeated under its key,
            the call is applied if it was not.
        replayed: none (the first time this call is answered), stored or recomputed (a retry: the first answer
            again), unavailable (a retry: the change was applied, but its answer is gone).
        durability: What survives a crash of Redis's host: always (all that was acknowledged), everysec (all but
            the last 2 s or so), none or unknown.
        lost: Number of acknowledged changes that Redis lost, 0 unless rolled_back.
        skipped: Whether images of the batch tell nothing, being of one colour or copies of another, and were answered
            without the state learning from them; the signal of that name says what share.
        adaptation: running, or paused: the client's batches are answered and not folded in.
    """

    version: int
    status: str
    committed: Committed
    replayed: str
    durability: str = "unknown"
    lost: int = 0
    skipped: bool = False
    adaptation: str = "running"


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Answer to one batch of B images among K classes.

    All of `labels`, `indices` and `confidence` are empty when `state.replayed` is "unavailable".

    Attributes:
        labels: Class name of each image. [B]
        indices: Class index of each image, int64 in 0..K-1. [B]
        confidence: Probability of that class, float64 in 0..1. [B]
        probabilities: Posterior of each image, float64, rows sum to 1; None unless asked for. [B, K]
        signals: Label-free measurements of the adapter by name; `skipped_batches`, only for numbered batches after
            a gap, is how many numbers are missing.
        request_id: Names the batch in `LabelledRow`, once true classes are known.
        idempotency_key: Key the batch was applied under; repeating the call with it returns this answer.
        key_expires_at_earliest: Until when the key is remembered for sure, in UTC; None if the server does not say.
        guard: Why the global model answers instead of the adapted one; None if it does not.
        ask: Rows of the batch whose labels would tell most, in the order of worth; mostly there is none.
    """

    client_id: str
    model: ModelRef
    adapter: str
    labels: tuple[str, ...]
    indices: NDArray[np.int64]
    confidence: NDArray[np.float64]
    probabilities: NDArray[np.float64] | None
    state: StateInfo
    signals: Mapping[str, float | tuple[float, ...]]
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None
    guard: GuardDecision | None = None
    ask: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptState:
    """An earlier state of a client that can be gone back to.

    Attributes:
        version: Its version.
        at: When it was stored, in UTC.
        bytes: Its size.
    """

    version: int
    at: datetime
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state the server holds for a client.

    Attributes:
        version: Number of changes applied so far.
        status, durability: As in `StateInfo`.
        bytes: Memory of Redis that the client takes: its state, journal, earlier states, timeline and answers.
        tier: Where it was found, e.g. the replica's memory or Redis.
        base: Version that Redis holds whole; the journal leads from there to `version`. None if not said.
        base_bytes: Size of that copy, 0 where there is none yet; None if not said.
        journal_entries: Batches in the journal; None if not said.
        journal_bytes: Size of the journal; None if not said.
        owner: Replica that writes the journal now, None if none does or it is not said.
        expires_in_s: Seconds until the state expires, unless the client is heard of again; None if not said.
        kept: Earlier states that can be gone back to, the newest first; see `Client.rollback`.
    """

    version: int
    status: str
    bytes: int
    tier: str
    durability: str = "unknown"
    base: int | None = None
    base_bytes: int | None = None
    journal_entries: int | None = None
    journal_bytes: int | None = None
    owner: str | None = None
    expires_in_s: float | None = None
    kept: tuple[KeptState, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """One client as the server knows it.

    Attributes:
        hyperparameters: Those that differ from their defaults.
        guard: Which model answers the client, and the evidence; None if the guard is off or the server has none.
        adaptation: As in `StateInfo`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    hyperparameters: Mapping[str, Any]
    state: StoredState
    request_id: str
    guard: Guard | None = None
    adaptation: str = "running"


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One batch, the mean of several in a row, or something else that befell a client.

    Attributes:
        version: Of the client's state, after the last of it.
        at: When that was stored, in UTC.
        batches: How many, 0 for what is no batch.
        images: Of these batches.
        signals: Means by name: what the adapter measured; `agreement`, the share of images on which adapted and frozen
            predictions agree; `frozen`, the share of batches that the frozen model answered.
        events: What else befell the client and how often, such as `reset`, `rollback`, `takeover` or `skipped`.
        prior: Estimated share of each class; empty if there is none. [K]
        modules: How far modules have moved, relative to their size; of one batch in 8, else empty.
        verdict: What labels showed by then; None if nobody compared.
        taken_over_from: Replica that had the client before, where another one took over.
    """

    version: int
    at: datetime
    batches: int
    images: int
    signals: Mapping[str, float]
    events: Mapping[str, int]
    prior: tuple[float, ...] = ()
    modules: Mapping[str, float] = field(default_factory=dict)
    verdict: str | None = None
    taken_over_from: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of a client, the oldest first; the older, the coarser.

    Attributes:
        classes: Names of the classes. [K]
        training_prior: Share of each class that the model was trained on; empty if it does not say. [K]
    """

    client_id: str
    model: ModelRef
    classes: tuple[str, ...]
    training_prior: tuple[float, ...]
    points: tuple[TimelinePoint, ...]


@dataclass(frozen=True, slots=True)
class ResetResult:
    """A client put back to the global model.

    Attributes:
        key_expires_at_earliest: As in `Prediction`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """A client that goes on from an earlier state.

    Attributes:
        restored: Version of that state; None where the answer of a repeated call is gone.
        key_expires_at_earliest: As in `Prediction`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    restored: int | None
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None


@dataclass(frozen=True, slots=True)
class ConfigureResult:
    """A client that runs the adapter it was configured with, or is paused.

    Attributes:
        hyperparameters: Those that differ from their defaults.
        changed: Whether this was not so before; where the adapter was another one, the state was reset.
        key_expires_at_earliest: As in `Prediction`.
        adaptation: As in `StateInfo`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    hyperparameters: Mapping[str, Any]
    changed: bool
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None
    adaptation: str = "running"


@dataclass(frozen=True, slots=True)
class EnrolResult:
    """A client that restarted from labelled images.

    Attributes:
        enrolled: Number of images; None where the answer of a repeated call is gone.
        key_expires_at_earliest: As in `Prediction`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    enrolled: int | None
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None


@dataclass(frozen=True, slots=True)
class ImportResult:
    """A client that goes on from an imported state.

    Attributes:
        key_expires_at_earliest: As in `Prediction`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """What true labels changed. Both `rows` and `guard` are None where the answer of a repeated call is gone.

    Attributes:
        rows: What became of the labelled rows.
        guard: Which model answers the client from now on, and the evidence.
        key_expires_at_earliest: As in `Prediction`.
    """

    client_id: str
    model: ModelRef
    adapter: str
    rows: RowCounts | None
    guard: Guard | None
    state: StateInfo
    request_id: str
    idempotency_key: str
    key_expires_at_earliest: datetime | None = None
