"""Each method of the clients as a record of what to send and how to read the reply. Nothing here sends."""

import json
import math
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, SupportsIndex, TypeVar

import httpx

from acclimate_client import _replies
from acclimate_client._images import Images, Layout, count, encode
from acclimate_client._version import __version__
from acclimate_client.results import (
    AdapterDescription,
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    ImportResult,
    ModelInfo,
    Prediction,
    ResetResult,
)

T = TypeVar("T")
Labels = Iterable[int | str | SupportsIndex]

CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
IDEMPOTENCY_KEY = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")  # spaces at the ends do not survive in a header
LONGEST_DEADLINE = 600.0  # seconds the server lets a request ask for
LAST_BATCH_NUMBER = 2**53 - 1  # the largest that every JSON reader and Lua keep exact


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

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Returns the request, relative to the base URL of `http`."""
        key = {} if self.idempotency_key is None else {"Idempotency-Key": self.idempotency_key}
        return http.build_request(
            self.method,
            self.path,
            params=self.params or None,
            content=self.content,
            headers={**self.headers, **key},
            timeout=httpx.USE_CLIENT_DEFAULT if self.timeout is None else self.timeout,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What both clients are configured with.

    Attributes:
        base_url: http or https URL of the service, or of the load balancer before it; may hold a path prefix.
        timeout: Seconds that one attempt may wait to connect, and for each piece of the reply.
        max_retries: Attempts after the first one.
        headers: Sent with every request, e.g. credentials.

    Raises:
        ValueError: One of them is outside its range.
    """

    base_url: str
    timeout: float
    max_retries: int
    headers: Mapping[str, str] | None

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        check_timeout(self.timeout)
        if self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries}; accepted are 0 and more")

    def all_headers(self) -> dict[str, str]:
        """Returns the headers of every request; the caller's win over our User-Agent."""
        return {"User-Agent": f"acclimate-client/{__version__}", **(self.headers or {})}


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
    check_timeout(timeout)
    path = f"{_client_path(client_id)}/predict"
    number = _batch_number(batch_number, adapt)
    key = _key(idempotency_key)
    body = encode(images, layout)
    return Call(
        method="POST",
        path=path,
        read=partial(_replies.read_prediction, idempotency_key=key),
        headers={**body.headers, **number, "X-Request-Timeout-Ms": _deadline(timeout)},
        params={"adapt": _flag(adapt), "probabilities": _flag(probabilities)},
        content=body.content,
        timeout=timeout,
        idempotency_key=key,
        writes=adapt,
    )


def get(client_id: str) -> Call[ClientInfo]:
    """Returns the call that describes a client."""
    return Call("GET", _client_path(client_id), _replies.read_client)


def reset(client_id: str, *, idempotency_key: str | None) -> Call[ResetResult]:
    """Returns the call that puts a client back to the global model."""
    path = f"{_client_path(client_id)}/reset"
    key = _key(idempotency_key)
    read = partial(_replies.read_reset, idempotency_key=key)
    return Call("POST", path, read, idempotency_key=key, writes=True)


def configure(
    client_id: str, adapter: str, hyperparameters: Mapping[str, Any], *, idempotency_key: str | None
) -> Call[ConfigureResult]:
    """Returns the call that chooses a client's adapter; raises TypeError and ValueError for what JSON cannot say."""
    path = _client_path(client_id)
    key = _key(idempotency_key)
    wanted = {"adapter": adapter, "hyperparameters": hyperparameters}
    content = json.dumps(wanted, allow_nan=False).encode()
    read = partial(_replies.read_configured, idempotency_key=key)
    headers = {"Content-Type": "application/json"}
    return Call("PUT", path, read, headers, content=content, idempotency_key=key, writes=True)


def enroll(
    client_id: str,
    images: Images,
    labels: Labels,
    *,
    idempotency_key: str | None,
    layout: Layout | None,
    timeout: float,
) -> Call[EnrolResult]:
    """Returns the call that enrols a client with labelled images; see `Client.enroll`."""
    check_timeout(timeout)
    path = f"{_client_path(client_id)}/enroll"
    key = _key(idempotency_key)
    listed = _labels(labels)
    body = encode(images, layout, json.dumps(listed))
    if len(listed) != count(images):
        raise ValueError(f"there are {len(listed)} labels for {count(images)} images; give one for each")
    return Call(
        method="POST",
        path=path,
        read=partial(_replies.read_enrolled, idempotency_key=key),
        headers={**body.headers, "X-Request-Timeout-Ms": _deadline(timeout)},
        content=body.content,
        timeout=timeout,
        idempotency_key=key,
        writes=True,
    )


def export_state(client_id: str) -> Call[bytes]:
    """Returns the call that fetches a client's state."""
    return Call("GET", f"{_client_path(client_id)}/state", _replies.read_content)


def import_state(
    client_id: str, data: bytes, *, replaces: int | None, idempotency_key: str | None
) -> Call[ImportResult]:
    """Returns the call that replaces a client's state; see `Client.import_state`."""
    path = f"{_client_path(client_id)}/state"
    key = _key(idempotency_key)
    read = partial(_replies.read_imported, idempotency_key=key)
    condition = {} if replaces is None else {"If-Match": f'"v{operator.index(replaces)}"'}
    headers = {"Content-Type": "application/octet-stream", **condition}
    return Call("PUT", path, read, headers, content=bytes(data), idempotency_key=key, writes=True)


def delete(client_id: str) -> Call[None]:
    """Returns the call that removes a client."""
    return Call("DELETE", _client_path(client_id), _replies.read_nothing, writes=True)


def models() -> Call[tuple[ModelInfo, ...]]:
    """Returns the call that lists the models."""
    return Call("GET", "/models", _replies.read_models)


def adapters() -> Call[tuple[AdapterDescription, ...]]:
    """Returns the call that lists the adapters."""
    return Call("GET", "/adapters", _replies.read_adapters)


def live() -> Call[bool]:
    """Returns the call that asks whether the process answers."""
    return Call("GET", "/v2/health/live", _replies.read_live, repeats=False)


def ready() -> Call[bool]:
    """Returns the call that asks whether the service takes batches."""
    return Call("GET", "/v2/health/ready", _replies.read_ready, repeats=False)


def check_timeout(timeout: float) -> None:
    """Raises ValueError unless `timeout` is a positive, finite number of seconds."""
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; accepted are seconds above 0")


def _deadline(timeout: float) -> str:
    return str(math.ceil(min(timeout, LONGEST_DEADLINE) * 1000))


def _labels(labels: Labels) -> list[int | str]:
    if isinstance(labels, str | bytes):
        raise TypeError(f"labels is a {type(labels).__name__}; give a list of class indices and class names")
    return [label if isinstance(label, str) else operator.index(label) for label in labels]


def _check_url(base_url: str) -> None:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is {base_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url is {base_url!r}; accepted is e.g. 'http://127.0.0.1:8000'")


def _client_path(client_id: str) -> str:
    if not CLIENT_ID.fullmatch(client_id):
        raise ValueError(
            f"client_id is {client_id!r}; accepted are 1 to 128 letters, digits and . _ ~ -, a letter or digit first"
        )
    return f"/clients/{client_id}"


def _key(idempotency_key: str | None) -> str:
    key = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise ValueError(
            f"idempotency_key is {key!r}; accepted are 1 to 255 printable ASCII characters, no space at either end"
        )
    return key


def _batch_number(batch_number: int | None, adapt: bool) -> dict[str, str]:
    if batch_number is None:
        return {}
    if not adapt:
        raise ValueError(f"batch_number is {batch_number!r}, but with adapt=False no batch is counted; pass None")
    if type(batch_number) is not int or not 1 <= batch_number <= LAST_BATCH_NUMBER:  # a bool is an int, too
        raise ValueError(f"batch_number is {batch_number!r}; accepted are None and an int in 1..{LAST_BATCH_NUMBER}")
    return {"X-Batch-Number": str(batch_number)}


def _flag(value: bool) -> str:
    return "true" if value else "false"
