"""Replies to results and errors. Nothing here sends or waits."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import DTypeLike, NDArray

from acclimate_client._problems import EXCERPT, committed, problem, request_id
from acclimate_client.errors import UnexpectedReplyError
from acclimate_client.results import (
    AdapterDescription,
    AdapterInfo,
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    ImportResult,
    InputInfo,
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
        predictions = [_as(dict, item) for item in _as(list, body["predictions"])]
        return Prediction(
            client_id=_as(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=_as(str, body["adapter"]),
            labels=tuple(_as(str, item["label"]) for item in predictions),
            indices=_array([_as(int, item["index"]) for item in predictions], np.int64),
            confidence=_array([_number(item["probability"]) for item in predictions], np.float64),
            probabilities=_posteriors(body.get("probabilities")),
            state=_state(body["state"]),
            signals=_signals(body.get("signals")),
            request_id=request_id(reply, body),
            idempotency_key=idempotency_key,
            key_expires_at_earliest=_time(body.get("key_expires_at_earliest")),
        )

    return read(reply, build)


def read_client(reply: httpx.Response) -> ClientInfo:
    """Reads the reply to get."""

    def build(body: Json) -> ClientInfo:
        return ClientInfo(
            client_id=_as(str, body["client_id"]),
            model=_model(body["model"]),
            adapter=_as(str, body["adapter"]),
            hyperparameters=_as(dict, body.get("hyperparameters", {})),
            state=_stored_state(_as(dict, body["state"])),
            request_id=request_id(reply, body),
        )

    return read(reply, build)


def read_reset(reply: httpx.Response, idempotency_key: str) -> ResetResult:
    """Reads the reply to reset."""
    return read(reply, lambda body: ResetResult(**_change(reply, body, idempotency_key)))


def read_configured(reply: httpx.Response, idempotency_key: str) -> ConfigureResult:
    """Reads the reply to configure."""

    def build(body: Json) -> ConfigureResult:
        return ConfigureResult(
            hyperparameters=_as(dict, body["hyperparameters"]),
            changed=_as(bool, body["changed"]),
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


def read_content(reply: httpx.Response) -> bytes:
    """Reads a reply that is bytes."""
    if not reply.is_success:
        raise problem(reply)
    return reply.content


def read_adapters(reply: httpx.Response) -> tuple[AdapterDescription, ...]:
    """Reads the reply to adapters."""
    return read(reply, lambda body: tuple(_adapter_description(_as(dict, a)) for a in _as(list, body["adapters"])))


def read_models(reply: httpx.Response) -> tuple[ModelInfo, ...]:
    """Reads the reply to models."""
    return read(reply, lambda body: tuple(_model_info(_as(dict, item)) for item in _as(list, body["models"])))


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
        "client_id": _as(str, body["client_id"]),
        "model": _model(body["model"]),
        "adapter": _as(str, body["adapter"]),
        "state": _state(body["state"]),
        "request_id": request_id(reply, body),
        "idempotency_key": idempotency_key,
        "key_expires_at_earliest": _time(body.get("key_expires_at_earliest")),
    }


def _adapter_description(fields: Json) -> AdapterDescription:
    availability = _adapter(fields)
    return AdapterDescription(
        name=_as(str, fields["name"]),
        description=_as(str, fields["description"]),
        enrols=fields["enrols"] is True,
        available=availability.available,
        missing=availability.missing,
        hyperparameters=_as(dict, fields["hyperparameters"]),
    )


def _model(value: object) -> ModelRef:
    fields = _as(dict, value)
    return ModelRef(_as(str, fields["name"]), _as(str, fields["version"]))


def _state(value: object) -> StateInfo:
    fields = _as(dict, value)
    return StateInfo(
        version=_as(int, fields["version"]),
        status=_as(str, fields["status"]),
        committed=committed(fields["committed"]),
        replayed=_as(str, fields["replayed"]),
        durability=_as(str, fields.get("durability", "unknown")),
        lost=_as(int, fields.get("lost", 0)),
    )


def _stored_state(fields: Json) -> StoredState:
    expires_in_s = fields.get("expires_in_s")
    return StoredState(
        version=_as(int, fields["version"]),
        status=_as(str, fields["status"]),
        bytes=_as(int, fields["bytes"]),
        tier=_as(str, fields["tier"]),
        durability=_as(str, fields.get("durability", "unknown")),
        base=_optional(int, fields.get("base")),
        journal_entries=_optional(int, fields.get("journal_entries")),
        journal_bytes=_optional(int, fields.get("journal_bytes")),
        owner=_optional(str, fields.get("owner")),
        expires_in_s=None if expires_in_s is None else _number(expires_in_s),
    )


def _model_info(fields: Json) -> ModelInfo:
    size = _as(dict, fields["input"])
    return ModelInfo(
        name=_as(str, fields["name"]),
        version=_as(str, fields["version"]),
        architecture=_as(str, fields["architecture"]),
        classes=tuple(_as(str, name) for name in _as(list, fields["classes"])),
        input=InputInfo(_as(int, size["channels"]), _as(int, size["height"]), _as(int, size["width"])),
        adapters={name: _adapter(value) for name, value in _as(dict, fields["adapters"]).items()},
        default=fields["default"] is True,
    )


def _adapter(value: object) -> AdapterInfo:
    fields = _as(dict, value)
    return AdapterInfo(fields["available"] is True, tuple(_as(str, name) for name in _as(list, fields["missing"])))


def _posteriors(value: object) -> NDArray[np.float64] | None:
    if value is None:
        return None
    return _array([[_number(p) for p in _as(list, row)] for row in _as(list, value)], np.float64)


def _signals(value: object) -> dict[str, float | tuple[float, ...]]:
    # A measurement of an unknown kind must not cost the user the prediction it came with.
    signals: dict[str, float | tuple[float, ...]] = {}
    for name, signal in _as(dict, value or {}).items():
        if isinstance(signal, list) and all(_is_measurement(number) for number in signal):
            signals[name] = tuple(_measurement(number) for number in signal)
        elif _is_measurement(signal):
            signals[name] = _measurement(signal)
    return signals


def _is_measurement(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _measurement(value: float | None) -> float:
    # JSON has no NaN; it arrives as null.
    return math.nan if value is None else float(value)


def _as(kind: type[T], value: object) -> T:
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, found {value!r}"[:EXCERPT])


def _optional(kind: type[T], value: object) -> T | None:
    return None if value is None else _as(kind, value)


def _time(value: object) -> datetime | None:
    if value is None:
        return None
    time = datetime.fromisoformat(_as(str, value))
    if time.tzinfo is None:
        raise ValueError(f"expected a time with its offset from UTC, found {value!r}"[:EXCERPT])
    return time.astimezone(UTC)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int) else _as(float, value)


def _array(values: Sequence[Any], dtype: DTypeLike) -> NDArray[Any]:
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
