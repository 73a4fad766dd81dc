"""The context of one request to a client: what it says, read step by step, and the reply to it."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import Response

from acclimate_service.clients.requests import ClientRequest, Reply
from acclimate_service.compute.labelling import Examples
from acclimate_service.errors import Problem
from acclimate_service.http.identity import client_scope, idempotency_key
from acclimate_service.http.payload import PayloadLimits, check_tokens, decode, decode_labelled
from acclimate_service.service import Service
from acclimate_service.state import fingerprint, random_rid

T = TypeVar("T")
_ARRAYS: Final = ("application/octet-stream", "application/x-npy")
_ON_LOOP: Final = 256 * 1024
"""Bytes of an array that are read in a fraction of a millisecond; another thread would take longer to begin."""
_TIMEOUT_MS: Final = re.compile(r"[0-9]{1,6}")
_LONGEST_TIMEOUT_MS: Final = 600_000


class RequestContext:
    """One request to a client.

    Args:
        service: what answers it.
        http: what came.
        client_id: of its path.
        keyed: whether an idempotency key matters, as it does to requests that change the client.

    Raises:
        Problem: the id, the key or the deadline is refused. The body is not read before.
    """

    def __init__(self, service: Service, http: Request, client_id: str, *, keyed: bool = True) -> None:
        self._service = service
        self._http = http
        self._deadline = _deadline(http, service.settings.request_timeout_ms)
        self.client = client_scope(client_id, service.settings.tenant)
        self._key = idempotency_key(http.headers.get("idempotency-key")) if keyed else None

    @property
    def media_type(self) -> str:
        """The header Content-Type."""
        return self._http.headers.get("content-type", "")

    def request(self, *content: bytes | memoryview, number: int = 0) -> ClientRequest:
        """The request as the service knows it.

        Args:
            content: all that decides the result; a repeated key with other content is refused.
            number: place of a batch in the client's stream, 0 for none.
        """
        rid = random_rid() if self._key is None else self.client.rid(self._key)
        return ClientRequest(
            client=self.client,
            rid=rid,
            fingerprint=self._fingerprint(rid, content),
            deadline=self._deadline,
            gone=self._has_gone,
            keyed=self._key is not None,
            name=self._http.state.request_id,
            number=number,
        )

    async def take(
        self, limit: int, parse: Callable[[bytes], tuple[T, tuple[bytes | memoryview, ...]]]
    ) -> tuple[ClientRequest, T]:
        """Read the body.

        Args:
            limit: bytes that it may have.
            parse: blocking; gives what the body means, and all that decides the result of the request. Runs in another
                thread unless the body is a small array.

        Raises:
            Problem, PayloadError: the request is refused.
        """
        early = self.request()
        body = await self._read(limit)

        def read() -> tuple[T, str]:
            content, parts = parse(body)
            return content, self._fingerprint(early.rid, parts)

        small = len(body) <= _ON_LOOP and self.media_type.lower().startswith(_ARRAYS)
        content, mark = read() if small else await asyncio.to_thread(read)
        return replace(early, fingerprint=mark), content

    def images(self, body: bytes) -> NDArray[Any]:
        """The images of a body, [B, C, H, W]; raises Problem and PayloadError. Blocking."""
        check_tokens(body, self.media_type)
        return decode(
            body, self.media_type, self._http.headers, self._service.bundle.manifest.input, self._payload_limits()
        )

    def examples(self, body: bytes) -> tuple[Examples, tuple[bytes | memoryview, ...]]:
        """The labelled images of a body, and all that tells them from others; raises as `images`. Blocking."""
        check_tokens(body, self.media_type)
        manifest = self._service.bundle.manifest
        images, labels = decode_labelled(
            body, self.media_type, self._http.headers, manifest.input, self._payload_limits(), manifest.classes
        )
        return Examples(images, labels), (kind_of(images), images.data.cast("B"), labels.tobytes())

    def reply(self, done: Reply) -> Response:
        """The reply to a request that changed the client, or might have."""
        state: dict[str, Any] = {
            "version": done.version,
            "status": done.status,
            "committed": done.committed,
            "replayed": done.replayed,
            "durability": self._service.store_facts.durability,
            **({"lost": done.lost} if done.status == "rolled_back" else {}),
        }
        head: dict[str, Any] = {"client_id": self.client.client, "model": model_of(self._service)}
        if b',"request_id":' not in done.answer:  # the rows of a repeated batch are known by its first request id
            head["request_id"] = self._http.state.request_id
        tail: dict[str, Any] = {"state": state}
        if self._key is not None and done.committed:
            tail["key_expires_at_earliest"] = _after(self._service.limits.key_min_ms)
        # the answer is JSON already, and may be large: its members are put between the others as they are
        members = (orjson.dumps(head)[1:-1], done.answer[1:-1], orjson.dumps(tail)[1:-1])
        body = b"{" + b",".join(filter(None, members)) + b"}"
        return Response(body, media_type="application/json")

    def _fingerprint(self, rid: str, content: tuple[bytes | memoryview, ...]) -> str:
        """What tells a repeat from another request under the same key; a random id has no repeats."""
        return rid if self._key is None else fingerprint(self._service.settings.secret.encode(), *content)

    def _payload_limits(self) -> PayloadLimits:
        settings = self._service.settings
        return PayloadLimits(max_images=settings.max_images, max_pixels=settings.max_pixels)

    async def _read(self, limit: int) -> bytes:
        """The body, refused as soon as it is known to be too large or too slow."""
        declared = self._http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(limit)
        pieces, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                async for piece in self._http.stream():
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    pieces.append(piece)
        except TimeoutError:
            raise Problem("deadline_exceeded", "the deadline passed before the body was here") from None
        return b"".join(pieces)

    async def _has_gone(self) -> bool:
        """Whether the caller has hung up since the body was read.

        One look at what has come since, without a wait: `Request.is_disconnected` cancels one, which takes the event
        loop two more rounds.
        """
        coming = self._http.receive().__await__()
        try:
            next(coming)
        except StopIteration as came:
            return bool(came.value["type"] == "http.disconnect")
        coming.close()
        return False


def json(body: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON reply."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def model_of(service: Service) -> dict[str, str]:
    """The model that is served, as replies name it."""
    manifest = service.bundle.manifest
    return {"name": manifest.name, "version": manifest.version}


def kind_of(images: NDArray[Any]) -> bytes:
    """What tells images from others of the same bytes."""
    return f"{images.shape} {images.dtype}".encode()


def _deadline(http: Request, longest: int) -> float:
    """When the caller stops to wait (monotonic seconds), at most `longest` milliseconds from now."""
    text = http.headers.get("x-request-timeout-ms")
    if text is not None and not (_TIMEOUT_MS.fullmatch(text) and 1 <= int(text) <= _LONGEST_TIMEOUT_MS):
        detail = f"X-Request-Timeout-Ms is a whole number of milliseconds from 1 to {_LONGEST_TIMEOUT_MS}"
        raise Problem("invalid_request", detail)
    return time.monotonic() + min(longest if text is None else int(text), longest) / 1000


def _after(milliseconds: int) -> str:
    """The time so much later (RFC 3339)."""
    then = datetime.now(UTC) + timedelta(milliseconds=milliseconds)
    return then.isoformat(timespec="seconds").replace("+00:00", "Z")


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"a request body may have {limit} bytes here; send less at once")
