"""Every error as an HTTP reply: RFC 9457 problem details, one table from code to status."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from acclimate_adapters import AcclimateError, InputError
from acclimate_adapters import StateCorrupt as UnreadableState
from acclimate_service.payload import PayloadError
from acclimate_service.state import StateCorrupt, StateError, StoreFull

MEDIA_TYPE = "application/problem+json"
CommittedField = bool | Literal["unknown"]

STATUS: dict[str, int] = {
    "malformed_body": 400,
    "not_found": 404,
    "client_unknown": 404,
    "method_not_allowed": 405,
    "request_running": 409,
    "conflict": 409,
    "client_deleted": 409,
    "key_used_before_delete": 409,
    "other_model": 409,
    "body_too_large": 413,
    "too_many_images": 413,
    "unsupported_media_type": 415,
    "invalid_client_id": 422,
    "invalid_request": 422,
    "empty_batch": 422,
    "wrong_shape": 422,
    "ambiguous_layout": 422,
    "ambiguous_dtype": 422,
    "wrong_dtype": 422,
    "out_of_range": 422,
    "non_finite": 422,
    "too_many_pixels": 422,
    "undecodable_image": 422,
    "key_reused": 422,
    "too_many_requests": 429,
    "internal": 500,
    "store_unavailable": 503,
    "state_corrupt": 503,
    "draining": 503,
    "deadline_exceeded": 504,
    "store_full": 507,
}

RETRY_AFTER_S: dict[str, int] = {
    "request_running": 1,
    "conflict": 1,
    "too_many_requests": 1,
    "store_unavailable": 1,
    "draining": 1,
    "deadline_exceeded": 1,
    "store_full": 5,
}
"""Codes of failures that pass: the same request may be sent again after so many seconds."""


class Problem(Exception):
    """A request that cannot be answered.

    Args:
        code: a key of `STATUS`, stable for programs.
        detail: what was wrong and what is accepted, for people.
        committed: whether the client's state changed all the same.
        headers: further headers of the reply.
    """

    def __init__(
        self, code: str, detail: str, committed: CommittedField = False, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.committed = committed
        self.headers = headers or {}

    def reply(self, request_id: str) -> Response:
        """The problem as an HTTP reply."""
        status = STATUS[self.code]
        body = {
            "type": "about:blank",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.code in RETRY_AFTER_S,
            "state_committed": self.committed,
            "request_id": request_id,
            "error": self.detail,
        }
        wait = RETRY_AFTER_S.get(self.code)
        headers = {**self.headers, **({} if wait is None else {"Retry-After": str(wait)})}
        return Response(orjson.dumps(body), status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the app, the framework's own included, as a problem."""

    async def answer(request: Request, error: Exception) -> Response:
        return problem_of(request, error).reply(request.state.request_id)

    for kind in (Problem, PayloadError, StateError, AcclimateError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def problem_of(request: Request, error: Exception) -> Problem:
    """The one table from errors to problems."""
    match error:
        case Problem():
            return error
        case PayloadError(code=code, detail=detail):
            return Problem(code, detail)
        case InputError():
            return Problem("invalid_request", str(error))
        case StateCorrupt() | UnreadableState():
            return Problem("state_corrupt", f"{error}; only a reset or a DELETE of the client helps")
        case StoreFull(committed=committed):
            return Problem("store_full", str(error), committed)
        case StateError(committed=committed):
            return Problem("store_unavailable", str(error), committed)
        case HTTPException():
            return _of_framework(request, error)
        case RequestValidationError():
            found = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
            return Problem("invalid_request", "; ".join(found))
        case _:
            detail = "the service failed on this request; its log has the details under this request id"
            return Problem("internal", detail, "unknown")


def _of_framework(request: Request, error: HTTPException) -> Problem:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        hint = "; a client id holds no '/'" if path.startswith("/clients/") else ""
        return Problem("not_found", f"there is nothing at {path}{hint}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = error.headers or {}
        detail = f"{request.method} is not accepted at {path}; use {headers.get('Allow', 'another method')}"
        return Problem("method_not_allowed", detail, headers=headers)
    return Problem("malformed_body", str(error.detail))
