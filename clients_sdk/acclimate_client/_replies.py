"""Replies to results and errors; nothing here sends or waits."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import DTypeLike, NDArray

from acclimate_client._decoding import Json, R, decoded, record, typed
from acclimate_client._problems import problem, request_id
from acclimate_client.errors import UnexpectedReplyError
from acclimate_client.evidence import AdapterEvidence, Ask, Evidence, Guard, GuardDecision, RowCounts
from acclimate_client.models import AdapterDescription, ModelEvidence, ModelInfo
from acclimate_client.pages import ClientPage, DeletedClients, ExportedState, FailedClient, ListedClient, StatePage
from acclimate_client.results import ClientInfo, FeedbackResult, Prediction, Timeline, TimelinePoint

T = TypeVar("T")


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
        predictions = [typed(dict, item) for item in typed(list, body["predictions"])]
        return record(
            Prediction,
            body,
            **_names(reply, body),
            idempotency_key=idempotency_key,
            labels=tuple(typed(str, item["label"]) for item in predictions),
            indices=_array([typed(int, item["index"]) for item in predictions], np.int64),
            confidence=_array([decoded(float, item["probability"]) for item in predictions], np.float64),
            probabilities=_posteriors(body.get("probabilities")),
            signals=_measurements(body.get("signals")),
        )

    return read(reply, build)


def read_change(reply: httpx.Response, kind: type[R], idempotency_key: str) -> R:
    """Reads the reply to a change of a client that is neither predict nor feedback."""

    def build(body: Json) -> R:
        known = {**_names(reply, body), "idempotency_key": idempotency_key}
        return record(kind, {"restored": None, "enrolled": None, **body}, **known)  # where the answer is gone

    return read(reply, build)


def read_feedback(reply: httpx.Response, idempotency_key: str) -> FeedbackResult:
    """Reads the reply to feedback."""

    def build(body: Json) -> FeedbackResult:
        return record(
            FeedbackResult,
            body,
            **_names(reply, body),
            idempotency_key=idempotency_key,
            rows=decoded(RowCounts | None, body.get("feedback")),
            guard=_guard(body.get("guard")),
        )

    return read(reply, build)


def read_client(reply: httpx.Response) -> ClientInfo:
    """Reads the reply to get."""

    def build(body: Json) -> ClientInfo:
        names = _names(reply, body)
        return record(ClientInfo, {"hyperparameters": {}, **body}, **names, guard=_guard(body.get("guard")))

    return read(reply, build)


def read_clients(reply: httpx.Response) -> ClientPage:
    """Reads the reply to clients."""

    def build(body: Json) -> ClientPage:
        listed = [{"adaptation": "running", **typed(dict, item)} for item in typed(list, body["clients"])]
        return record(ClientPage, body, clients=tuple(record(ListedClient, item) for item in listed))

    return read(reply, build)


def read_states(reply: httpx.Response) -> StatePage:
    """Reads the reply to export_states: a line for each client, and a last one for all of them."""

    def build(body: Json) -> StatePage:
        *clients, end = (typed(dict, line) for line in typed(list, body))
        states = tuple(record(ExportedState, client) for client in clients if "state" in client)
        failed = tuple(record(FailedClient, client) for client in clients if "state" not in client)
        if (len(states), len(failed)) != (end["exported"], end["failed"]):
            raise ValueError("the page is not whole")
        return record(StatePage, end, states=states, failed=failed)

    return read(reply, build, lambda reply: list(map(json.loads, reply.content.splitlines())))


def read_deleted(reply: httpx.Response) -> DeletedClients:
    """Reads the reply to delete_clients."""
    return read(reply, lambda body: record(DeletedClients, body))


def read_timeline(reply: httpx.Response) -> Timeline:
    """Reads the reply to timeline."""

    def build(body: Json) -> Timeline:
        return record(Timeline, body, training_prior=decoded(tuple[float, ...], body["training_prior"] or []))

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
            point = fields.get("event") == "point"
            return record(TimelinePoint, typed(dict, json.loads(fields["data"]))) if point else None
        except (ValueError, TypeError, KeyError) as error:
            detail = f"{self._reply.url} does not answer like an Acclimate server: {error!r}"
            raise UnexpectedReplyError(detail) from error


def read_asks(reply: httpx.Response) -> tuple[tuple[Ask, ...], str | None]:
    """Reads a page of the reply to asks, and where the next one begins."""
    return read(
        reply,
        lambda body: (
            tuple(ask for client in typed(list, body["clients"]) for ask in _asks(typed(dict, client))),
            decoded(str | None, body["next"]),
        ),
    )


def read_asks_of_client(reply: httpx.Response) -> tuple[tuple[Ask, ...], None]:
    """Reads the reply to asks of one client, which is one page."""
    return read(reply, lambda body: (_asks(body), None))


def read_adapters(reply: httpx.Response) -> tuple[AdapterDescription, ...]:
    """Reads the reply to adapters."""

    def build(body: Json) -> tuple[AdapterDescription, ...]:
        described = [_flags(item, "available", "enrols") for item in typed(list, body["adapters"])]
        return tuple(record(AdapterDescription, item) for item in described)

    return read(reply, build)


def read_evidence(reply: httpx.Response) -> ModelEvidence:
    """Reads the reply to evidence."""

    def build(body: Json) -> ModelEvidence:
        adapters = [typed(dict, item) for item in typed(list, body["adapters"])]
        told = tuple(record(AdapterEvidence, {**item, "evidence": item["guard"]}) for item in adapters)
        return record(ModelEvidence, body, adapters=told)

    return read(reply, build)


def read_models(reply: httpx.Response) -> tuple[ModelInfo, ...]:
    """Reads the reply to models."""

    def info(item: object) -> ModelInfo:
        fields = _flags(item, "default")
        adapters = {name: _flags(each, "available") for name, each in typed(dict, fields["adapters"]).items()}
        return record(ModelInfo, {**fields, "adapters": adapters})

    return read(reply, lambda body: tuple(info(item) for item in typed(list, body["models"])))


def read_content(reply: httpx.Response) -> bytes:
    """Reads a reply that is bytes."""
    if not reply.is_success:
        raise problem(reply)
    return reply.content


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


def _names(reply: httpx.Response, body: Json) -> dict[str, str]:
    """Of the client and of the request, for which a header may stand in."""
    return {"client_id": typed(str, body["client_id"]), "request_id": request_id(reply, body)}


def _guard(value: object) -> Guard | None:
    """The member `guard` of a client, which is the decision and the evidence in one."""
    if value is None:
        return None
    members = typed(dict, value)
    return Guard(record(GuardDecision, members), record(Evidence, members))


def _flags(value: object, *names: str) -> dict[str, Any]:
    """The members of an object, of which these count only where they are true."""
    members = typed(dict, value)
    return {**members, **{name: members[name] is True for name in names}}


def _asks(fields: Json) -> tuple[Ask, ...]:
    """The member `asks` of a client."""
    client_id = typed(str, fields["client_id"])
    questions = [typed(dict, item) for item in typed(list, fields["asks"])]
    return tuple(
        Ask(client_id, typed(str, question["request_id"]), typed(int, row))
        for question in questions
        for row in typed(list, question["rows"])
    )


def _posteriors(value: object) -> NDArray[np.float64] | None:
    rows = decoded(tuple[tuple[float, ...], ...] | None, value)
    return None if rows is None else _array(rows, np.float64)


def _array(values: Sequence[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The values as an array that cannot be written to."""
    made = np.array(values, dtype=dtype)
    made.setflags(write=False)
    return made


def _measurements(value: object) -> dict[str, float | tuple[float, ...]]:
    """The signals of a step by name."""
    # A measurement of an unknown kind must not cost the user the prediction it came with.
    known: dict[str, float | tuple[float, ...]] = {}
    for name, signal in typed(dict, value or {}).items():
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
