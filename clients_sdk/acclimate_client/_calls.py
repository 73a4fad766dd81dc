"""Each method of the clients as a record of what to send and how to read the reply. Nothing here sends."""

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode

import httpx

from acclimate_client import _checks, _replies
from acclimate_client._checks import Labels
from acclimate_client._images import Images, Layout, count, encode
from acclimate_client._version import __version__
from acclimate_client.evidence import Ask, LabelledRow
from acclimate_client.models import AdapterDescription, ModelEvidence, ModelInfo
from acclimate_client.pages import ClientPage, DeletedClients, StatePage
from acclimate_client.results import (
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    FeedbackResult,
    ImportResult,
    Prediction,
    ResetResult,
    RollbackResult,
    Timeline,
)

T = TypeVar("T")
LONGEST_RESOLUTION = 86_400  # seconds
QUIET = 60.0  # seconds without a sign of life after which a server that is watched is taken for dead


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One logical call: the same request for every attempt.

    Attributes:
        read: Reads the reply, or raises the error it stands for.
        timeout: Seconds to wait for the server, None for the client's own.
        idempotency_key: Key under which the server applies the call at most once.
        writes: Whether the call may change a client's state.
        repeats: Whether to try again after a failure that allows it.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    timeout: float | None = None
    idempotency_key: str | None = None
    writes: bool = False
    repeats: bool = True

    def since(self, version: int | None) -> "Call[T]":
        """Returns the call for what came after a version; None for what comes from now on."""
        return self if version is None else replace(self, headers={**self.headers, "Last-Event-ID": str(version)})

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Returns the request, relative to the base URL of `http`."""
        key = {} if self.idempotency_key is None else {"Idempotency-Key": self.idempotency_key}
        target = f"{self.path}?{urlencode(self.params)}" if self.params else self.path
        return http.build_request(
            self.method,
            _url(http.base_url, target),
            content=self.content,
            headers={**self.headers, **key},
            timeout=httpx.USE_CLIENT_DEFAULT if self.timeout is None else self.timeout,
        )


class Sending(TypedDict):
    """What calls that send images have in common; see `Client.predict`."""

    idempotency_key: str | None
    layout: Layout | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What both clients are configured with.

    Attributes:
        base_url: http or https URL of the service, or of the load balancer before it; may hold a path prefix.
        timeout: Seconds that one attempt may wait to connect, and for each piece of the reply.
        max_retries: Attempts after the first one.
        headers: Sent with every request, e.g. credentials.
        model: Name of the model whose clients are meant, where the service has several; None for the default one.
        api_key: Key of the tenant whose clients are meant; None where the service asks for none.

    Raises:
        ValueError: One of them is outside its range.
    """

    base_url: str
    timeout: float
    max_retries: int
    headers: Mapping[str, str] | None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _checks.check_url(self.base_url)
        _checks.check_timeout(self.timeout)
        if self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries}; accepted are 0 and more")
        if self.model is not None:
            _checks.model_path(self.model)
        if self.api_key is not None:
            _checks.check_api_key(self.api_key)

    def of_model(self, call: Call[T]) -> Call[T]:
        """Returns the call for clients of the model that is meant."""
        if self.model is None or not f"{call.path}/".startswith(("/clients/", "/states/", "/asks/")):
            return call
        return replace(call, path=f"/models/{self.model}{call.path}")

    def limit(self, timeout: float | None) -> float:
        """Returns the timeout of a call that may name one of its own."""
        return self.timeout if timeout is None else timeout

    def sending(self, idempotency_key: str | None, layout: Layout | None, timeout: float | None) -> Sending:
        """Returns what a call that sends images is given."""
        return Sending(idempotency_key=idempotency_key, layout=layout, timeout=self.limit(timeout))

    def all_headers(self) -> dict[str, str]:
        """Returns the headers of every request; the caller's win over our User-Agent."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"User-Agent": f"acclimate-client/{__version__}", **key, **(self.headers or {})}


def predict(
    client_id: str,
    images: Images,
    *,
    adapt: bool,
    probabilities: bool,
    batch_number: int | None,
    idempotency_key: str | None,
    layout: Layout | None,
    timeout: float,
) -> Call[Prediction]:
    """Returns the call that predicts one batch; see `Client.predict`."""
    deadline = _checks.deadline(timeout)
    path = f"{_checks.client_path(client_id)}/predict"
    number = _checks.batch_number(batch_number, adapt)
    key = _checks.key(idempotency_key)
    body = encode(images, layout)
    return Call(
        method="POST",
        path=path,
        read=partial(_replies.read_prediction, idempotency_key=key),
        headers={**body.headers, **number, **deadline},
        params={"adapt": _checks.flag(adapt), "probabilities": _checks.flag(probabilities)},
        content=body.content,
        timeout=timeout,
        idempotency_key=key,
        writes=adapt,
    )


def get(client_id: str) -> Call[ClientInfo]:
    """Returns the call that describes a client."""
    return Call("GET", _checks.client_path(client_id), _replies.read_client)


def reset(client_id: str, *, idempotency_key: str | None) -> Call[ResetResult]:
    """Returns the call that puts a client back to the global model."""
    path = f"{_checks.client_path(client_id)}/reset"
    key = _checks.key(idempotency_key)
    read = partial(_replies.read_change, kind=ResetResult, idempotency_key=key)
    return Call("POST", path, read, idempotency_key=key, writes=True)


def rollback(client_id: str, version: int | None, *, idempotency_key: str | None) -> Call[RollbackResult]:
    """Returns the call that takes a client back to an earlier state."""
    path = f"{_checks.client_path(client_id)}/rollback"
    key = _checks.key(idempotency_key)
    content = None if version is None else json.dumps({"version": _checks.version(version)}).encode()
    headers = {} if content is None else {"Content-Type": "application/json"}
    read = partial(_replies.read_change, kind=RollbackResult, idempotency_key=key)
    return Call("POST", path, read, headers, content=content, idempotency_key=key, writes=True)


def configure(
    client_id: str, adapter: str, hyperparameters: Mapping[str, Any], *, idempotency_key: str | None
) -> Call[ConfigureResult]:
    """Returns the call that chooses a client's adapter; raises TypeError and ValueError for what JSON cannot say."""
    return _configured(client_id, {"adapter": adapter, "hyperparameters": hyperparameters}, idempotency_key)


def adaptation(client_id: str, wanted: str, *, idempotency_key: str | None) -> Call[ConfigureResult]:
    """Returns the call that pauses a client, or lets it go on."""
    return _configured(client_id, {"adaptation": wanted}, idempotency_key)


def _configured(client_id: str, wanted: Mapping[str, Any], idempotency_key: str | None) -> Call[ConfigureResult]:
    path = _checks.client_path(client_id)
    key = _checks.key(idempotency_key)
    content = json.dumps(wanted, allow_nan=False).encode()
    read = partial(_replies.read_change, kind=ConfigureResult, idempotency_key=key)
    headers = {"Content-Type": "application/json"}
    return Call("PUT", path, read, headers, content=content, idempotency_key=key, writes=True)


def enroll(client_id: str, images: Images, labels: Labels, **sending: Unpack[Sending]) -> Call[EnrolResult]:
    """Returns the call that enrols a client with labelled images; see `Client.enroll`."""
    path = f"{_checks.client_path(client_id)}/enroll"
    return _labelled(path, partial(_replies.read_change, kind=EnrolResult), images, labels, **sending)


def feedback(
    client_id: str, rows: Iterable[LabelledRow], *, idempotency_key: str | None, timeout: float
) -> Call[FeedbackResult]:
    """Returns the call that tells the true labels of predicted rows; see `Client.feedback`."""
    deadline = _checks.deadline(timeout)
    path = f"{_checks.client_path(client_id)}/feedback"
    key = _checks.key(idempotency_key)
    return Call(
        method="POST",
        path=path,
        read=partial(_replies.read_feedback, idempotency_key=key),
        headers={"Content-Type": "application/json", **deadline},
        content=json.dumps({"rows": _checks.labelled(rows)}).encode(),
        timeout=timeout,
        idempotency_key=key,
        writes=True,
    )


def asks(client_id: str | None, cursor: str) -> Call[tuple[tuple[Ask, ...], str | None]]:
    """Returns the call that fetches a page of what is asked, and where the next one begins; see `Client.asks`."""
    if client_id is not None:
        return Call("GET", f"{_checks.client_path(client_id)}/asks", _replies.read_asks_of_client)
    return Call("GET", "/asks", _replies.read_asks, params={"cursor": cursor} if cursor else {})


def feedback_images(client_id: str, images: Images, labels: Labels, **sending: Unpack[Sending]) -> Call[FeedbackResult]:
    """Returns the call that tells labels together with their images; see `Client.feedback_images`."""
    path = f"{_checks.client_path(client_id)}/feedback"
    return _labelled(path, _replies.read_feedback, images, labels, **sending)


def export_state(client_id: str) -> Call[bytes]:
    """Returns the call that fetches a client's state."""
    return Call("GET", f"{_checks.client_path(client_id)}/state", _replies.read_content)


def import_state(
    client_id: str, data: bytes, *, replaces: int | None, idempotency_key: str | None
) -> Call[ImportResult]:
    """Returns the call that replaces a client's state; see `Client.import_state`."""
    path = f"{_checks.client_path(client_id)}/state"
    key = _checks.key(idempotency_key)
    read = partial(_replies.read_change, kind=ImportResult, idempotency_key=key)
    condition = {} if replaces is None else {"If-Match": f'"v{operator.index(replaces)}"'}
    headers = {"Content-Type": "application/octet-stream", **condition}
    return Call("PUT", path, read, headers, content=bytes(data), idempotency_key=key, writes=True)


def delete(client_id: str) -> Call[None]:
    """Returns the call that removes a client."""
    return Call("DELETE", _checks.client_path(client_id), _replies.read_nothing, writes=True)


class Wanted(TypedDict):
    """Which clients, and how many of them at once; see `Client.clients`."""

    limit: int
    adapter: str | None
    active_since: datetime | None
    verdict: str | None


def clients(cursor: str | None, **wanted: Unpack[Wanted]) -> Call[ClientPage]:
    """Returns the call that lists clients; see `Client.clients`."""
    return Call("GET", "/clients", _replies.read_clients, params=_page(cursor, **wanted))


def export_states(cursor: str | None, **wanted: Unpack[Wanted]) -> Call[StatePage]:
    """Returns the call that fetches the states of a page of clients; see `Client.export_states`."""
    return Call("GET", "/states", _replies.read_states, params=_page(cursor, **wanted))


def delete_clients(cursor: str | None, *, everyone: bool, **wanted: Unpack[Wanted]) -> Call[DeletedClients]:
    """Returns the call that removes a page of clients; see `Client.delete_clients`."""
    if not (everyone or wanted["adapter"] or wanted["active_since"] or wanted["verdict"]):
        raise ValueError("nothing says which clients are to be deleted; everyone=True means all")
    params = _page(cursor, **wanted) | ({"all": "true"} if everyone else {})
    return Call("DELETE", "/clients", _replies.read_deleted, params=params, writes=True)


def _page(
    cursor: str | None, *, limit: int, adapter: str | None, active_since: datetime | None, verdict: str | None
) -> dict[str, str]:
    wanted = {
        "limit": str(operator.index(limit)),
        "cursor": cursor,
        "adapter": adapter,
        "active_since": _checks.moment(active_since),
        "verdict": verdict,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def timeline(client_id: str, since: datetime | None, resolution: float | None) -> Call[Timeline]:
    """Returns the call that fetches what became of a client; see `Client.timeline`."""
    if resolution is not None and not 0 <= resolution <= LONGEST_RESOLUTION:
        raise ValueError(f"resolution is {resolution}; accepted are 0 to {LONGEST_RESOLUTION} seconds")
    wanted = {"since": _checks.moment(since), "resolution": None if resolution is None else str(resolution)}
    params = {name: value for name, value in wanted.items() if value is not None}
    return Call("GET", f"{_checks.client_path(client_id)}/timeline", _replies.read_timeline, params=params)


def watch(client_id: str) -> Call[None]:
    """Returns the call that brings what becomes of a client; see `Client.watch`."""
    path = f"{_checks.client_path(client_id)}/timeline/live"
    return Call("GET", path, _replies.read_nothing, timeout=QUIET)


def models() -> Call[tuple[ModelInfo, ...]]:
    """Returns the call that lists the models."""
    return Call("GET", "/models", _replies.read_models)


def evidence(model: str) -> Call[ModelEvidence]:
    """Returns the call that fetches what labels say of the adapters of a model."""
    return Call("GET", f"{_checks.model_path(model)}/adapters", _replies.read_evidence)


def adapters() -> Call[tuple[AdapterDescription, ...]]:
    """Returns the call that lists the adapters."""
    return Call("GET", "/adapters", _replies.read_adapters)


def live() -> Call[bool]:
    """Returns the call that asks whether the process answers."""
    return Call("GET", "/v2/health/live", _replies.read_live, repeats=False)


def ready() -> Call[bool]:
    """Returns the call that asks whether the service takes batches."""
    return Call("GET", "/v2/health/ready", _replies.read_ready, repeats=False)


def _labelled(
    path: str,
    read: Callable[..., T],
    images: Images,
    labels: Labels,
    *,
    idempotency_key: str | None,
    layout: Layout | None,
    timeout: float,
) -> Call[T]:
    """The call that sends images with their labels."""
    key = _checks.key(idempotency_key)
    deadline = _checks.deadline(timeout)
    listed = _checks.listed(labels)
    body = encode(images, layout, json.dumps(listed))
    if len(listed) != count(images):
        raise ValueError(f"there are {len(listed)} labels for {count(images)} images; give one for each")
    return Call(
        method="POST",
        path=path,
        read=partial(read, idempotency_key=key),
        headers={**body.headers, **deadline},
        content=body.content,
        timeout=timeout,
        idempotency_key=key,
        writes=True,
    )


@lru_cache(maxsize=256)
def _url(base: httpx.URL, target: str) -> httpx.URL:
    """A path below the base URL; parsing it takes longer than all else that a request is made of."""
    return base.copy_with(raw_path=base.raw_path + target.removeprefix("/").encode("ascii"))
