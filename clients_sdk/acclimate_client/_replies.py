"""Replies to results and errors. Nothing here sends or waits."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from acclimate_client import _guards
from acclimate_client._members import array, measurements, moment, number, optional, optional_number, typed
from acclimate_client._problems import committed, problem, request_id
from acclimate_client.errors import UnexpectedReplyError
from acclimate_client.results import (
    AdapterDescription,
    AdapterInfo,
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    FeedbackResult,
    ImportResult,
    InputInfo,
    ModelEvidence,
    ModelInfo,
    ModelRef,
    Prediction,
    ResetResult,
    StateInfo,
    StoredState,
)

T = TypeVar("T")
Json = Mapping[str, Any]


def read(reply: httpx.Response, build: Callable[[Json], T]) -> T:
    """Returns what `build` makes of a successful reply.

    Raises:
        ProblemError: The status is not 2xx.
        UnexpectedReplyError: The body is not JSON, or `build` did not find what it needs in it.
    """
    if not reply.is_success:
        raise problem(reply)
    try:
        return build(reply.json())
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = f"no member {error}" if isinstance(error, KeyError) else str(error)
        raise UnexpectedReplyError(f"{reply.url} does not answer like an Acclimate server: {reason}") from error


def read_prediction(reply: httpx.Response, idempotency_key: str) -> Prediction:
    """Reads the reply to predict."""

    def build(body: Json) -> Prediction:
        predictions = [typed(dict, item) for item in typed(list, body["predictions"])]
        return Prediction(
            client_id=typed(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=typed(str, body["adapter"]),
            labels=tuple(typed(str, item["label"]) for item in predictions),
            indices=array([typed(int, item["index"]) for item in predictions], np.int64),
            confidence=array([number(item["probability"]) for item in predictions], np.float64),
            probabilities=_posteriors(body.get("probabilities")),
            state=_state(body["state"]),
            signals=measurements(body.get("signals")),
            request_id=request_id(reply, body),
            idempotency_key=idempotency_key,
            key_expires_at_earliest=moment(body.get("key_expires_at_earliest")),
            guard=_guards.decision(body.get("guard")),
        )

    return read(reply, build)


def read_client(reply: httpx.Response) -> ClientInfo:
    """Reads the reply to get."""

    def build(body: Json) -> ClientInfo:
        return ClientInfo(
            client_id=typed(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=typed(str, body["adapter"]),
            hyperparameters=typed(dict, body.get("hyperparameters", {})),
            state=_stored_state(typed(dict, body["state"])),
            request_id=request_id(reply, body),
            guard=_guards.guard(body.get("guard")),
        )

    return read(reply, build)


def read_reset(reply: httpx.Response, idempotency_key: str) -> ResetResult:
    """Reads the reply to reset."""
    return read(reply, lambda body: ResetResult(**_change(reply, body, idempotency_key)))


def read_configured(reply: httpx.Response, idempotency_key: str) -> ConfigureResult:
    """Reads the reply to configure."""

    def build(body: Json) -> ConfigureResult:
        return ConfigureResult(
            hyperparameters=typed(dict, body["hyperparameters"]),
            changed=typed(bool, body["changed"]),
            **_change(reply, body, idempotency_key),
        )

    return read(reply, build)


def read_enrolled(reply: httpx.Response, idempotency_key: str) -> EnrolResult:
    """Reads the reply to enroll."""

    def build(body: Json) -> EnrolResult:
        return EnrolResult(enrolled=optional(int, body.get("enrolled")), **_change(reply, body, idempotency_key))

    return read(reply, build)


def read_imported(reply: httpx.Response, idempotency_key: str) -> ImportResult:
    """Reads the reply to import."""
    return read(reply, lambda body: ImportResult(**_change(reply, body, idempotency_key)))


def read_feedback(reply: httpx.Response, idempotency_key: str) -> FeedbackResult:
    """Reads the reply to feedback."""

    def build(body: Json) -> FeedbackResult:
        return FeedbackResult(
            rows=_guards.row_counts(body.get("feedback")),
            guard=_guards.guard(body.get("guard")),
            **_change(reply, body, idempotency_key),
        )

    return read(reply, build)


def read_content(reply: httpx.Response) -> bytes:
    """Reads a reply that is bytes."""
    if not reply.is_success:
        raise problem(reply)
    return reply.content


def read_adapters(reply: httpx.Response) -> tuple[AdapterDescription, ...]:
    """Reads the reply to adapters."""
    return read(reply, lambda body: tuple(_adapter_description(typed(dict, a)) for a in typed(list, body["adapters"])))


def read_evidence(reply: httpx.Response) -> ModelEvidence:
    """Reads the reply to evidence."""

    def build(body: Json) -> ModelEvidence:
        adapters = tuple(_guards.adapter_evidence(item) for item in typed(list, body["adapters"]))
        return ModelEvidence(model=_model(body["model"]), policy=typed(str, body["policy"]), adapters=adapters)

    return read(reply, build)


def read_models(reply: httpx.Response) -> tuple[ModelInfo, ...]:
    """Reads the reply to models."""
    return read(reply, lambda body: tuple(_model_info(typed(dict, item)) for item in typed(list, body["models"])))


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
        "client_id": typed(str, body["client_id"]),
        "model": _model(body["model"]),
        "adapter": typed(str, body["adapter"]),
        "state": _state(body["state"]),
        "request_id": request_id(reply, body),
        "idempotency_key": idempotency_key,
        "key_expires_at_earliest": moment(body.get("key_expires_at_earliest")),
    }


def _adapter_description(fields: Json) -> AdapterDescription:
    availability = _adapter(fields)
    return AdapterDescription(
        name=typed(str, fields["name"]),
        description=typed(str, fields["description"]),
        enrols=fields["enrols"] is True,
        available=availability.available,
        missing=availability.missing,
        hyperparameters=typed(dict, fields["hyperparameters"]),
    )


def _model(value: object) -> ModelRef:
    fields = typed(dict, value)
    return ModelRef(typed(str, fields["name"]), typed(str, fields["version"]))


def _state(value: object) -> StateInfo:
    fields = typed(dict, value)
    return StateInfo(
        version=typed(int, fields["version"]),
        status=typed(str, fields["status"]),
        committed=committed(fields["committed"]),
        replayed=typed(str, fields["replayed"]),
        durability=typed(str, fields.get("durability", "unknown")),
        lost=typed(int, fields.get("lost", 0)),
    )


def _stored_state(fields: Json) -> StoredState:
    return StoredState(
        version=typed(int, fields["version"]),
        status=typed(str, fields["status"]),
        bytes=typed(int, fields["bytes"]),
        tier=typed(str, fields["tier"]),
        durability=typed(str, fields.get("durability", "unknown")),
        base=optional(int, fields.get("base")),
        journal_entries=optional(int, fields.get("journal_entries")),
        journal_bytes=optional(int, fields.get("journal_bytes")),
        owner=optional(str, fields.get("owner")),
        expires_in_s=optional_number(fields.get("expires_in_s")),
    )


def _model_info(fields: Json) -> ModelInfo:
    size = typed(dict, fields["input"])
    return ModelInfo(
        name=typed(str, fields["name"]),
        version=typed(str, fields["version"]),
        architecture=typed(str, fields["architecture"]),
        classes=tuple(typed(str, name) for name in typed(list, fields["classes"])),
        input=InputInfo(typed(int, size["channels"]), typed(int, size["height"]), typed(int, size["width"])),
        adapters={name: _adapter(value) for name, value in typed(dict, fields["adapters"]).items()},
        default=fields["default"] is True,
    )


def _adapter(value: object) -> AdapterInfo:
    fields = typed(dict, value)
    return AdapterInfo(fields["available"] is True, tuple(typed(str, name) for name in typed(list, fields["missing"])))


def _posteriors(value: object) -> NDArray[np.float64] | None:
    if value is None:
        return None
    return array([[number(p) for p in typed(list, row)] for row in typed(list, value)], np.float64)
