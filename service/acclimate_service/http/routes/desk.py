"""What the handlers of all routes share: names, headers and bodies of requests, and the form of replies."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import Request as HttpRequest
from numpy.typing import NDArray
from starlette.responses import Response

from acclimate_service.clients.requests import ClientRequest, Reply
from acclimate_service.compute.labelling import Examples
from acclimate_service.errors import Problem
from acclimate_service.http.identity import client_id as valid_client_id
from acclimate_service.http.identity import idempotency_key
from acclimate_service.http.payload import PayloadLimits, decode, decode_labelled
from acclimate_service.service import Service
from acclimate_service.state import ClientScope, fingerprint, random_rid

T = TypeVar("T")
_ARRAYS = ("application/octet-stream", "application/x-npy")
_ON_LOOP = 256 * 1024
"""Bytes of an array that are read in a fraction of a millisecond; another thread would take longer to begin."""
_TIMEOUT_MS = re.compile(r"[0-9]{1,6}")
_LONGEST_TIMEOUT_MS = 600_000
_MAX_JSON_TOKENS = 1_000_000
"""Numbers and lists in a JSON body. Its parser holds the GIL: ten million lists stop everything for 8 s."""


class Desk:
    """Takes requests in and gives replies out."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.settings = service.settings
        self.limits = PayloadLimits(max_images=service.settings.max_images, max_pixels=service.settings.max_pixels)
        self._manifest = service.bundle.manifest
        self.model = {"name": self._manifest.name, "version": self._manifest.version}
        self._secret = service.settings.secret.encode()

    def scope(self, client_id: str) -> ClientScope:
        """The client of this deployment with a valid id."""
        return ClientScope(valid_client_id(client_id), self.settings.tenant)

    def request(self, http: HttpRequest, client_id: str, what: bytes, *, keyed: bool = True) -> ClientRequest:
        """A request without a body; arguments as in `take`, `what` names it."""
        return self._request(http, client_id, self._deadline(http), (what,), keyed=keyed)

    async def take(
        self,
        http: HttpRequest,
        client_id: str,
        limit: int,
        parse: Callable[[bytes], tuple[T, tuple[bytes, ...]]],
        *,
        keyed: bool = True,
    ) -> tuple[ClientRequest, T]:
        """Read the body of a request.

        Args:
            http: what came.
            client_id: of its path.
            limit: bytes that the body may have.
            parse: blocking; gives what the body means, and all that decides the result of the request. Runs in another
                thread unless the body is a small array.
            keyed: whether an idempotency key matters, as it does to requests that change the client.

        Raises:
            Problem, PayloadError: the request is refused.
        """
        deadline = self._deadline(http)
        early = self._request(http, client_id, deadline, (), keyed=keyed)  # refused before its body is read
        body = await _read(http, limit, deadline)

        def read() -> tuple[T, str]:
            content, parts = parse(body)
            return content, fingerprint(self._secret, *parts)

        content, mark = read() if _is_quick(http, body) else await asyncio.to_thread(read)
        return replace(early, fingerprint=mark), content

    def images(self, http: HttpRequest, body: bytes) -> NDArray[Any]:
        """The images of a body; raises Problem and PayloadError."""
        media_type = http.headers.get("content-type", "")
        check_tokens(body, media_type)
        return decode(body, media_type, http.headers, self._manifest.input, self.limits)

    def examples(self, http: HttpRequest, body: bytes) -> tuple[Examples, tuple[bytes, ...]]:
        """The labelled images of a body, and all that tells them from others; raises Problem and PayloadError."""
        media_type, manifest = http.headers.get("content-type", ""), self._manifest
        check_tokens(body, media_type)
        images, labels = decode_labelled(body, media_type, http.headers, manifest.input, self.limits, manifest.classes)
        return Examples(images, labels), (kind_of(images).encode(), images.tobytes(), labels.tobytes())

    def reply(self, done: Reply, request: ClientRequest) -> Response:
        """The reply to a request that changes a client, or might."""
        state: dict[str, Any] = {
            "version": done.version,
            "status": done.status,
            "committed": done.committed,
            "replayed": done.replayed,
            "durability": self.service.store_facts.durability,
            **({"lost": done.lost} if done.status == "rolled_back" else {}),
        }
        body = {"client_id": request.client.client, "model": self.model, "request_id": request.name}
        body |= {**done.answer, "state": state}  # the rows of a repeated batch are known by its first request id
        if request.keyed and done.committed:
            body["key_expires_at_earliest"] = _after(self.service.limits.key_min_ms)
        return json(body)

    def _request(
        self, http: HttpRequest, client_id: str, deadline: float, parts: tuple[bytes, ...], *, keyed: bool
    ) -> ClientRequest:
        scope = self.scope(client_id)
        key = idempotency_key(http.headers.get("idempotency-key")) if keyed else None
        rid = random_rid() if key is None else scope.rid(key)
        mark = fingerprint(self._secret, *parts)
        return ClientRequest(
            *(scope, rid, mark, deadline, partial(_has_gone, http)), keyed=key is not None, name=http.state.request_id
        )

    def _deadline(self, http: HttpRequest) -> float:
        """When the caller stops to wait (monotonic seconds)."""
        longest = self.settings.request_timeout_ms
        text = http.headers.get("x-request-timeout-ms")
        if text is not None and not (_TIMEOUT_MS.fullmatch(text) and 1 <= int(text) <= _LONGEST_TIMEOUT_MS):
            detail = f"X-Request-Timeout-Ms is a whole number of milliseconds from 1 to {_LONGEST_TIMEOUT_MS}"
            raise Problem("invalid_request", detail)
        return time.monotonic() + min(longest if text is None else int(text), longest) / 1000


def json(body: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON reply."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def kind_of(images: NDArray[Any]) -> str:
    """What tells images from others of the same bytes."""
    return f"{images.shape} {images.dtype}"


def check_tokens(body: bytes, media_type: str) -> None:
    """Refuse JSON that would take too long to parse, by two quick scans; base64 has neither character."""
    if media_type.lower().startswith("application/json") and body.count(b",") + body.count(b"[") > _MAX_JSON_TOKENS:
        detail = f"a JSON body may hold {_MAX_JSON_TOKENS} numbers and lists; send application/x-npy or base64 images"
        raise Problem("body_too_large", detail)


def _after(milliseconds: int) -> str:
    """The time so much later (RFC 3339)."""
    then = datetime.now(UTC) + timedelta(milliseconds=milliseconds)
    return then.isoformat(timespec="seconds").replace("+00:00", "Z")


async def _read(http: HttpRequest, limit: int, deadline: float) -> bytes:
    """The body, refused as soon as it is known to be too large or too slow."""
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            async for piece in http.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise Problem("deadline_exceeded", "the deadline passed before the body was here") from None
    return bytes(body)


def _is_quick(http: HttpRequest, body: bytes) -> bool:
    return len(body) <= _ON_LOOP and http.headers.get("content-type", "").lower().startswith(_ARRAYS)


async def _has_gone(http: HttpRequest) -> bool:
    """Whether the caller of a request whose body was read has hung up.

    One look at what has come since, without a wait: `Request.is_disconnected` cancels one, which takes the event loop
    two more rounds.
    """
    coming = http.receive().__await__()
    try:
        next(coming)
    except StopIteration as came:
        return bool(came.value["type"] == "http.disconnect")
    coming.close()
    return False


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"a request body may have {limit} bytes here; send less at once")
