"""Replies to results and errors: first each reply, then its records, then the members of which they are made.

Nothing here sends or waits. A reader of a member raises TypeError or ValueError for what it does not take.
"""

import json
import math
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import DTypeLike, NDArray

from acclimate_client._problems import EXCERPT, committed, problem, request_id
from acclimate_client.errors import UnexpectedReplyError
from acclimate_client.evidence import (
    AccuracyInterval,
    AdapterEvidence,
    Ask,
    Evidence,
    Guard,
    GuardDecision,
    RowCounts,
)
from acclimate_client.results import (
    AdapterDescription,
    AdapterInfo,
    ClientInfo,
    ClientPage,
    ConfigureResult,
    DeletedClients,
    EnrolResult,
    ExportedState,
    FailedClient,
    FeedbackResult,
    ImportResult,
    InputInfo,
    KeptState,
    ListedClient,
    ModelEvidence,
    ModelInfo,
    ModelRef,
    Prediction,
    ResetResult,
    RollbackResult,
    StateInfo,
    StatePage,
    StoredState,
    Timeline,
    TimelinePoint,
    Usage,
)

T = TypeVar("T")
Json = Mapping[str, Any]


def read(
    reply: httpx.Response, build: Callable[[Json], T], document: Callable[[httpx.Response], Any] = httpx.Response.json
) -> T:
    """Returns what `build` makes of the document of a successful reply.

    Raises:
        ProblemError: The status is not 2xx.
        UnexpectedReplyError: The body is not JSON, or `build` did not find what it needs in it.
    """
    if not reply.is_success:
        raise problem(reply)
    try:
        return build(document(reply))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = f"no member {error}" if isinstance(error, KeyError) else str(error)
        raise UnexpectedReplyError(f"{reply.url} does not answer like an Acclimate server: {reason}") from error


def read_prediction(reply: httpx.Response, idempotency_key: str) -> Prediction:
    """Reads the reply to predict."""

    def build(body: Json) -> Prediction:
        predictions = [_typed(dict, item) for item in _typed(list, body["predictions"])]
        return Prediction(
            client_id=_typed(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=_typed(str, body["adapter"]),
            labels=tuple(_typed(str, item["label"]) for item in predictions),
            indices=_array([_typed(int, item["index"]) for item in predictions], np.int64),
            confidence=_array([_number(item["probability"]) for item in predictions], np.float64),
            probabilities=_posteriors(body.get("probabilities")),
            state=_state(body["state"]),
            signals=_measurements(body.get("signals")),
            request_id=request_id(reply, body),
            idempotency_key=idempotency_key,
            key_expires_at_earliest=_moment(body.get("key_expires_at_earliest")),
            guard=_guard_decision(body.get("guard")),
            ask=tuple(_typed(int, row) for row in _typed(list, body.get("ask", []))),
        )

    return read(reply, build)


def read_client(reply: httpx.Response) -> ClientInfo:
    """Reads the reply to get."""

    def build(body: Json) -> ClientInfo:
        return ClientInfo(
            client_id=_typed(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=_typed(str, body["adapter"]),
            hyperparameters=_typed(dict, body.get("hyperparameters", {})),
            state=_stored_state(_typed(dict, body["state"])),
            request_id=request_id(reply, body),
            guard=_guard(body.get("guard")),
            adaptation=_adaptation(body),
        )

    return read(reply, build)


def read_states(reply: httpx.Response) -> StatePage:
    """Reads the reply to export_states: a line for each client, and a last one for all of them."""

    def build(body: Json) -> StatePage:
        *clients, end = (_typed(dict, line) for line in _typed(list, body))
        states = tuple(_exported(client) for client in clients if "state" in client)
        failed = tuple(_failed(client) for client in clients if "state" not in client)
        if (len(states), len(failed)) != (end["exported"], end["failed"]):
            raise ValueError("the page is not whole")
        return StatePage(states, failed, _optional(str, end["next"]))

    return read(reply, build, lambda reply: list(map(json.loads, reply.content.splitlines())))


def read_deleted(reply: httpx.Response) -> DeletedClients:
    """Reads the reply to delete_clients."""

    def build(body: Json) -> DeletedClients:
        deleted = tuple(_typed(str, client) for client in _typed(list, body["deleted"]))
        failed = tuple(_failed(_typed(dict, client)) for client in _typed(list, body["failed"]))
        return DeletedClients(deleted, failed, _optional(str, body["next"]))

    return read(reply, build)


def read_clients(reply: httpx.Response) -> ClientPage:
    """Reads the reply to clients."""

    def build(body: Json) -> ClientPage:
        listed = tuple(_listed_client(_typed(dict, item)) for item in _typed(list, body["clients"]))
        return ClientPage(_model(body["model"]), listed, _optional(str, body["next"]), _usage(body.get("usage")))

    return read(reply, build)


def read_timeline(reply: httpx.Response) -> Timeline:
    """Reads the reply to timeline."""

    def build(body: Json) -> Timeline:
        return Timeline(
            client_id=_typed(str, body["client_id"]),
            model=_model(body["model"]),
            classes=tuple(_typed(str, name) for name in _typed(list, body["classes"])),
            training_prior=_numbers(body["training_prior"] or []),
            points=tuple(_point(_typed(dict, item)) for item in _typed(list, body["points"])),
        )

    return read(reply, build)


class Events:
    """Server-sent events of a client's timeline, read line by line.

    Args:
        reply: which brings them.

    Attributes:
        last: version after which to go on; None before there is one.
    """

    def __init__(self, reply: httpx.Response) -> None:
        self.last: int | None = None
        self._reply = reply
        self._fields: dict[str, str] = {}

    def point(self, line: str) -> TimelinePoint | None:
        """Returns the point that a line completes, None if it completes none.

        Raises:
            UnexpectedReplyError: It is not what an Acclimate server sends.
        """
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        try:
            if "id" in fields:
                self.last = int(fields["id"])
            return _point(_typed(dict, json.loads(fields["data"]))) if fields.get("event") == "point" else None
        except (ValueError, TypeError, KeyError) as error:
            detail = f"{self._reply.url} does not answer like an Acclimate server: {error!r}"
            raise UnexpectedReplyError(detail) from error


def read_reset(reply: httpx.Response, idempotency_key: str) -> ResetResult:
    """Reads the reply to reset."""
    return read(reply, lambda body: ResetResult(**_change(reply, body, idempotency_key)))


def read_rolled_back(reply: httpx.Response, idempotency_key: str) -> RollbackResult:
    """Reads the reply to rollback."""

    def build(body: Json) -> RollbackResult:
        return RollbackResult(restored=_optional(int, body.get("restored")), **_change(reply, body, idempotency_key))

    return read(reply, build)


def read_configured(reply: httpx.Response, idempotency_key: str) -> ConfigureResult:
    """Reads the reply to configure."""

    def build(body: Json) -> ConfigureResult:
        return ConfigureResult(
            hyperparameters=_typed(dict, body["hyperparameters"]),
            changed=_typed(bool, body["changed"]),
            adaptation=_adaptation(body),
            **_change(reply, body, idempotency_key),
        )

    return read(reply, build)


def read_enrolled(reply: httpx.Response, idempotency_key: str) -> EnrolResult:
    """Reads the reply to enroll."""

    def build(body: Json) -> EnrolResult:
        return EnrolResult(enrolled=_optional(int, body.get("enrolled")), **_change(reply, body, idempotency_key))

    return read(reply, build)


def read_imported(reply: httpx.Response, idempotency_key: str) -> ImportResult:
    """Reads the reply to import."""
    return read(reply, lambda body: ImportResult(**_change(reply, body, idempotency_key)))


def read_feedback(reply: httpx.Response, idempotency_key: str) -> FeedbackResult:
    """Reads the reply to feedback."""

    def build(body: Json) -> FeedbackResult:
        return FeedbackResult(
            rows=_row_counts(body.get("feedback")),
            guard=_guard(body.get("guard")),
            **_change(reply, body, idempotency_key),
        )

    return read(reply, build)


def read_asks(reply: httpx.Response) -> tuple[tuple[Ask, ...], str | None]:
    """Reads a page of the reply to asks, and where the next one begins."""
    return read(
        reply,
        lambda body: (
            tuple(ask for client in _typed(list, body["clients"]) for ask in _asks(_typed(dict, client))),
            _optional(str, body["next"]),
        ),
    )


def read_asks_of_client(reply: httpx.Response) -> tuple[tuple[Ask, ...], None]:
    """Reads the reply to asks of one client, which is one page."""
    return read(reply, lambda body: (_asks(body), None))


def read_content(reply: httpx.Response) -> bytes:
    """Reads a reply that is bytes."""
    if not reply.is_success:
        raise problem(reply)
    return reply.content


def read_adapters(reply: httpx.Response) -> tuple[AdapterDescription, ...]:
    """Reads the reply to adapters."""
    return read(
        reply, lambda body: tuple(_adapter_description(_typed(dict, a)) for a in _typed(list, body["adapters"]))
    )


def read_evidence(reply: httpx.Response) -> ModelEvidence:
    """Reads the reply to evidence."""

    def build(body: Json) -> ModelEvidence:
        adapters = tuple(_adapter_evidence(item) for item in _typed(list, body["adapters"]))
        return ModelEvidence(model=_model(body["model"]), policy=_typed(str, body["policy"]), adapters=adapters)

    return read(reply, build)


def read_models(reply: httpx.Response) -> tuple[ModelInfo, ...]:
    """Reads the reply to models."""
    return read(reply, lambda body: tuple(_model_info(_typed(dict, item)) for item in _typed(list, body["models"])))


def read_nothing(reply: httpx.Response) -> None:
    """Reads a reply of which only the status counts."""
    if not reply.is_success:
        raise problem(reply)


def read_live(reply: httpx.Response) -> bool:
    """Reads the reply of a health route; any 5xx, a proxy's included, means no."""
    return not reply.is_server_error and read(reply, lambda body: body["live"] is True)


def read_ready(reply: httpx.Response) -> bool:
    """Reads the reply of the readiness route; any 5xx, a proxy's included, means no."""
    return not reply.is_server_error and read(reply, lambda body: body["ready"] is True)


def _change(reply: httpx.Response, body: Json, idempotency_key: str) -> dict[str, Any]:
    """What the replies to all changes but predict have in common."""
    return {
        "client_id": _typed(str, body["client_id"]),
        "model": _model(body["model"]),
        "adapter": _typed(str, body["adapter"]),
        "state": _state(body["state"]),
        "request_id": request_id(reply, body),
        "idempotency_key": idempotency_key,
        "key_expires_at_earliest": _moment(body.get("key_expires_at_earliest")),
    }


def _adapter_description(fields: Json) -> AdapterDescription:
    availability = _adapter(fields)
    return AdapterDescription(
        name=_typed(str, fields["name"]),
        description=_typed(str, fields["description"]),
        enrols=fields["enrols"] is True,
        available=availability.available,
        missing=availability.missing,
        hyperparameters=_typed(dict, fields["hyperparameters"]),
    )


def _model(value: object) -> ModelRef:
    fields = _typed(dict, value)
    return ModelRef(_typed(str, fields["name"]), _typed(str, fields["version"]))


def _state(value: object) -> StateInfo:
    fields = _typed(dict, value)
    return StateInfo(
        version=_typed(int, fields["version"]),
        status=_typed(str, fields["status"]),
        committed=committed(fields["committed"]),
        replayed=_typed(str, fields["replayed"]),
        durability=_typed(str, fields.get("durability", "unknown")),
        lost=_typed(int, fields.get("lost", 0)),
        skipped=_typed(bool, fields.get("skipped", False)),
        adaptation=_adaptation(fields),
    )


def _adaptation(fields: Json) -> str:
    return _typed(str, fields.get("adaptation", "running"))


def _stored_state(fields: Json) -> StoredState:
    return StoredState(
        version=_typed(int, fields["version"]),
        status=_typed(str, fields["status"]),
        bytes=_typed(int, fields["bytes"]),
        tier=_typed(str, fields["tier"]),
        durability=_typed(str, fields.get("durability", "unknown")),
        base=_optional(int, fields.get("base")),
        base_bytes=_optional(int, fields.get("base_bytes")),
        journal_entries=_optional(int, fields.get("journal_entries")),
        journal_bytes=_optional(int, fields.get("journal_bytes")),
        owner=_optional(str, fields.get("owner")),
        expires_in_s=_optional_number(fields.get("expires_in_s")),
        kept=tuple(_kept(_typed(dict, kept)) for kept in _typed(list, fields.get("kept", []))),
    )


def _kept(fields: Json) -> KeptState:
    at = _moment(_typed(str, fields["at"]))
    assert at is not None
    return KeptState(_typed(int, fields["version"]), at, _typed(int, fields["bytes"]))


def _model_info(fields: Json) -> ModelInfo:
    size = _typed(dict, fields["input"])
    return ModelInfo(
        name=_typed(str, fields["name"]),
        version=_typed(str, fields["version"]),
        architecture=_typed(str, fields["architecture"]),
        classes=tuple(_typed(str, name) for name in _typed(list, fields["classes"])),
        input=InputInfo(_typed(int, size["channels"]), _typed(int, size["height"]), _typed(int, size["width"])),
        adapters={name: _adapter(value) for name, value in _typed(dict, fields["adapters"]).items()},
        default=fields["default"] is True,
    )


def _adapter(value: object) -> AdapterInfo:
    fields = _typed(dict, value)
    return AdapterInfo(
        fields["available"] is True, tuple(_typed(str, name) for name in _typed(list, fields["missing"]))
    )


def _posteriors(value: object) -> NDArray[np.float64] | None:
    if value is None:
        return None
    return _array([[_number(p) for p in _typed(list, row)] for row in _typed(list, value)], np.float64)


def _usage(value: object) -> Usage | None:
    if value is None:
        return None
    fields = _typed(dict, value)
    return Usage(
        clients=_typed(int, fields["clients"]),
        most_clients=_typed(int, fields["most_clients"]),
        bytes=_typed(int, fields["bytes"]),
        most_bytes=_optional(int, fields["most_bytes"]),
    )


def _exported(fields: Json) -> ExportedState:
    return ExportedState(
        client_id=_typed(str, fields["client_id"]),
        adapter=_typed(str, fields["adapter"]),
        hyperparameters=_typed(dict, fields["hyperparameters"]),
        version=_typed(int, fields["version"]),
        state=b64decode(_typed(str, fields["state"]), validate=True),
    )


def _failed(fields: Json) -> FailedClient:
    return FailedClient(
        client_id=_typed(str, fields["client_id"]),
        code=_typed(str, fields["code"]),
        detail=_typed(str, fields["detail"]),
        state_committed=committed(fields["state_committed"]),
    )


def _listed_client(fields: Json) -> ListedClient:
    """One item of the member `clients`."""
    return ListedClient(
        client_id=_typed(str, fields["client_id"]),
        adapter=_typed(str, fields["adapter"]),
        hyperparameters=_typed(dict, fields["hyperparameters"]),
        adaptation=_adaptation(fields),
        version=_typed(int, fields["version"]),
        bytes=_typed(int, fields["bytes"]),
        changed_at=_moment(fields["changed_at"]),
        verdict=_optional(str, fields["verdict"]),
        labelled=_optional(int, fields.get("labelled")),
        gain=_optional_number(fields.get("gain")),
    )


def _point(fields: Json) -> TimelinePoint:
    """One item of the member `points` of a timeline."""
    at = _moment(_typed(str, fields["at"]))
    assert at is not None
    return TimelinePoint(
        version=_typed(int, fields["version"]),
        at=at,
        batches=_typed(int, fields["batches"]),
        images=_typed(int, fields["images"]),
        signals={name: _number(value) for name, value in _typed(dict, fields["signals"]).items()},
        events={name: _typed(int, count) for name, count in _typed(dict, fields["events"]).items()},
        prior=_numbers(fields.get("prior", [])),
        modules={name: _number(size) for name, size in _typed(dict, fields.get("modules", {})).items()},
        verdict=_optional(str, fields.get("verdict")),
        taken_over_from=_optional(str, fields.get("taken_over_from")),
    )


def _numbers(value: object) -> tuple[float, ...]:
    return tuple(_number(each) for each in _typed(list, value))


def _guard_decision(value: object) -> GuardDecision | None:
    """The member `guard` of a prediction."""
    return None if value is None else _decision(_typed(dict, value))


def _guard(value: object) -> Guard | None:
    """The member `guard` of a client."""
    if value is None:
        return None
    fields = _typed(dict, value)
    return Guard(_decision(fields), _evidence(fields))


def _row_counts(value: object) -> RowCounts | None:
    """The member `feedback`."""
    if value is None:
        return None
    fields = _typed(dict, value)
    return RowCounts(
        counted=_typed(int, fields["counted"]),
        duplicate=_typed(int, fields["duplicate"]),
        contradicting=_typed(int, fields["contradicting"]),
        unknown=_typed(int, fields["unknown"]),
    )


def _adapter_evidence(value: object) -> AdapterEvidence:
    """One item of the member `adapters` of a model."""
    fields = _typed(dict, value)
    return AdapterEvidence(
        adapter=_typed(str, fields["adapter"]),
        hyperparameters=_typed(dict, fields["hyperparameters"]),
        clients=_typed(int, fields["clients"]),
        candidate=_typed(bool, fields["candidate"]),
        evidence=_evidence(_typed(dict, fields["guard"])),
    )


def _decision(fields: Json) -> GuardDecision:
    return GuardDecision(answering=_typed(str, fields["answering"]), because=_typed(str, fields["because"]))


def _evidence(fields: Json) -> Evidence:
    return Evidence(
        verdict=_typed(str, fields["verdict"]),
        labelled=_typed(int, fields["labelled"]),
        wins=_typed(int, fields["wins"]),
        losses=_typed(int, fields["losses"]),
        frozen=_accuracy(fields["frozen"]),
        adapted=_accuracy(fields["adapted"]),
        asked=_typed(int, fields.get("asked", 0)),
    )


def _accuracy(value: object) -> AccuracyInterval:
    fields = _typed(dict, value)
    return AccuracyInterval(
        accuracy=_optional_number(fields["accuracy"]),
        low=_optional_number(fields["low"]),
        high=_optional_number(fields["high"]),
    )


def _asks(fields: Json) -> tuple[Ask, ...]:
    """The member `asks` of a client."""
    client_id = _typed(str, fields["client_id"])
    questions = [_typed(dict, item) for item in _typed(list, fields["asks"])]
    return tuple(
        Ask(client_id, _typed(str, question["request_id"]), _typed(int, row))
        for question in questions
        for row in _typed(list, question["rows"])
    )


def _typed(kind: type[T], value: object) -> T:
    """The value if it is of this type."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, found {value!r}"[:EXCERPT])


def _optional(kind: type[T], value: object) -> T | None:
    """The value if it is of this type, or None."""
    return None if value is None else _typed(kind, value)


def _number(value: object) -> float:
    """A JSON number, which may be written without a point."""
    return float(value) if isinstance(value, int) else _typed(float, value)


def _optional_number(value: object) -> float | None:
    """A JSON number, or None."""
    return None if value is None else _number(value)


def _moment(value: object) -> datetime | None:
    """An ISO 8601 time with its offset as one in UTC, or None."""
    if value is None:
        return None
    time = datetime.fromisoformat(_typed(str, value))
    if time.tzinfo is None:
        raise ValueError(f"expected a time with its offset from UTC, found {value!r}"[:EXCERPT])
    return time.astimezone(UTC)


def _array(values: Sequence[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The values as an array that cannot be written to."""
    made = np.array(values, dtype=dtype)
    made.setflags(write=False)
    return made


def _measurements(value: object) -> dict[str, float | tuple[float, ...]]:
    """The signals of a step by name."""
    # A measurement of an unknown kind must not cost the user the prediction it came with.
    known: dict[str, float | tuple[float, ...]] = {}
    for name, signal in _typed(dict, value or {}).items():
        if isinstance(signal, list) and all(_is_measurement(item) for item in signal):
            known[name] = tuple(_measurement(item) for item in signal)
        elif _is_measurement(signal):
            known[name] = _measurement(signal)
    return known


def _is_measurement(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _measurement(value: float | None) -> float:
    # JSON has no NaN; it arrives as null.
    return math.nan if value is None else float(value)
