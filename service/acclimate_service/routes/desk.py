"""What the handlers of all routes share: names, headers and bodies of requests, and the form of replies."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request as HttpRequest
from starlette.responses import Response

from acclimate_service.changes import Reply, Request
from acclimate_service.identity import client_id as valid_client_id
from acclimate_service.identity import idempotency_key
from acclimate_service.payload import PayloadLimits
from acclimate_service.problems import Problem
from acclimate_service.service import Service
from acclimate_service.state import ClientScope, fingerprint, random_rid

T = TypeVar("T")
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
        self.model = {"name": service.bundle.manifest.name, "version": service.bundle.manifest.version}
        self._secret = service.settings.secret.encode()

    def scope(self, client_id: str) -> ClientScope:
        """The client of this deployment with a valid id."""
        return ClientScope(valid_client_id(client_id), self.settings.tenant)

    def request(self, http: HttpRequest, client_id: str, what: bytes, *, keyed: bool = True) -> Request:
        """A request without a body; arguments as in `take`, `what` names it."""
        scope = self.scope(client_id)
        rid = self._rid(http, scope) if keyed else random_rid()
        return Request(scope, rid, fingerprint(self._secret, what), self._deadline(http), http.is_disconnected)

    async def take(
        self,
        http: HttpRequest,
        client_id: str,
        limit: int,
        parse: Callable[[bytes], tuple[T, tuple[bytes, ...]]],
        *,
        keyed: bool = True,
    ) -> tuple[Request, T]:
        """Read the body of a request.

        Args:
            http: what came.
            client_id: of its path.
            limit: bytes that the body may have.
            parse: blocking; gives what the body means, and all that decides the result of the request.
            keyed: whether an idempotency key matters, as it does to requests that change the client.

        Raises:
            Problem, PayloadError: the request is refused.
        """
        scope, deadline = self.scope(client_id), self._deadline(http)
        rid = self._rid(http, scope) if keyed else random_rid()
        body = await _read(http, limit, deadline)
        content, parts = await asyncio.to_thread(parse, body)
        return Request(scope, rid, fingerprint(self._secret, *parts), deadline, http.is_disconnected), content

    def reply(self, http: HttpRequest, done: Reply, request: Request) -> Response:
        """The reply to a request that changes a client, or might."""
        state = {"version": done.version, "status": done.status, "committed": done.committed, "replayed": done.replayed}
        head = {"client_id": request.client.client, "model": self.model}
        return json({**head, **done.answer, "state": state, "request_id": http.state.request_id})

    def _rid(self, http: HttpRequest, scope: ClientScope) -> str:
        key = idempotency_key(http.headers.get("idempotency-key"))
        return random_rid() if key is None else scope.rid(key)

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


def check_tokens(body: bytes, media_type: str) -> None:
    """Refuse JSON that would take too long to parse, by two quick scans; base64 has neither character."""
    if media_type.lower().startswith("application/json") and body.count(b",") + body.count(b"[") > _MAX_JSON_TOKENS:
        detail = f"a JSON body may hold {_MAX_JSON_TOKENS} numbers and lists; send application/x-npy or base64 images"
        raise Problem("body_too_large", detail)


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


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"a request body may have {limit} bytes here; send less at once")
