"""Every error as an HTTP reply: RFC 9457 problem details, one table from code to status."""

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from acclimate_adapters import InputError
from acclimate_adapters import StateError as UnusableState
from acclimate_service.errors import Problem
from acclimate_service.http.pacing import Refusals, caller_of
from acclimate_service.http.payload import PayloadError
from acclimate_service.state import (
    ClientDeleted,
    ClientUnknown,
    Contended,
    ForeignValue,
    JournalFull,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    OutOfOrder,
    Paused,
    RateExceeded,
    RequestRunning,
    StateCorrupt,
    StateError,
    StateUnreadable,
    StepFailed,
    StoreFull,
    TooManyBytes,
    TooManyClients,
    VersionUnknown,
)

MEDIA_TYPE = "application/problem+json"

STATUS: dict[str, int] = {
    "malformed_body": 400,
    "malformed_request": 400,
    "unsupported": 400,
    "unauthorized": 401,
    "scope_missing": 403,
    "origin_not_allowed": 403,
    "import_off": 403,
    "adapter_not_allowed": 403,
    "not_found": 404,
    "client_unknown": 404,
    "version_unknown": 404,
    "method_not_allowed": 405,
    "head_too_slow": 408,
    "request_running": 409,
    "conflict": 409,
    "client_deleted": 409,
    "key_used_before_delete": 409,
    "other_model": 409,
    "state_mismatch": 409,
    "out_of_order": 409,
    "version_not_loaded": 409,
    "version_in_use": 409,
    "guard_off": 409,
    "timeline_off": 409,
    "images_off": 409,
    "precondition_failed": 412,
    "body_too_large": 413,
    "too_many_images": 413,
    "unsupported_media_type": 415,
    "host_not_allowed": 421,
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
    "invalid_configuration": 422,
    "unavailable_adapter": 422,
    "step_too_costly": 422,
    "enrolment_unsupported": 422,
    "invalid_labels": 422,
    "invalid_state": 422,
    "version_unfit": 422,
    "invalid_feedback": 422,
    "too_many_requests": 429,
    "rate_exceeded": 429,
    "head_too_large": 431,
    "internal": 500,
    "step_failed": 500,
    "too_many_connections": 503,
    "store_unavailable": 503,
    "journal_full": 503,
    "state_corrupt": 503,
    "state_unreadable": 503,
    "deadline_exceeded": 504,
    "store_full": 507,
}

RETRY_AFTER_S: dict[str, int] = {
    "request_running": 1,
    "conflict": 1,
    "version_not_loaded": 1,
    "too_many_requests": 1,
    "rate_exceeded": 1,
    "head_too_slow": 1,
    "too_many_connections": 1,
    "store_unavailable": 1,
    "journal_full": 1,
    "deadline_exceeded": 1,
    "store_full": 5,
}
"""Codes of failures that pass: the same request may be sent again after so many seconds."""

_LATER_S: Final = 60
"""For what an operator has to mend: no retry of the caller makes sense before."""


def reply(problem: Problem, request_id: str) -> Response:
    """A problem as an HTTP reply."""
    status = STATUS[problem.code]
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": problem.detail,
        "code": problem.code,
        "retryable": problem.code in RETRY_AFTER_S,
        "state_committed": problem.committed,
        "request_id": request_id,
        "error": problem.detail,
    }
    later = _LATER_S if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) else None
    wait = RETRY_AFTER_S.get(problem.code, later)
    headers = {**({} if wait is None else {"Retry-After": str(wait)}), **problem.headers}
    return Response(orjson.dumps(body), status, headers, MEDIA_TYPE)


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "A problem (RFC 9457).",
        "headers": {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}},
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""What the OpenAPI document says of every route's errors."""

_OURS: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE)
"""Failures of the service, which its log tells of; that a caller's deadline passed is none."""
_HANDLED: Final = (
    Problem,
    PayloadError,
    StateError,
    InputError,
    UnusableState,
    HTTPException,
    RequestValidationError,
    ClientDisconnect,
)
_log = logging.getLogger(__name__)


def install(app: FastAPI, models: Sequence[str]) -> None:
    """Answer every expected error of the app, the framework's own included, as a problem.

    The others rise to `RequestMiddleware`, which answers them within reach of the request id and the metrics.

    Args:
        app: whose errors.
        models: names of those that are served.
    """
    app.state.models, app.state.refusals = models, Refusals()
    for kind in _HANDLED:
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """The reply to an error; the log keeps what callers are not told."""
    problem = problem_of(request, error)
    identity, caller = request.state.request_id, request.state.caller_request_id
    named = identity if caller is None else f"{identity} (of its caller {caller})"
    if problem.code in ("internal", "step_failed"):
        _log.error("request %s failed", named, exc_info=error)
    elif isinstance(error, StateError) and STATUS[problem.code] in _OURS:
        _log.warning("request %s: %s", named, error)
    if STATUS[problem.code] == HTTPStatus.TOO_MANY_REQUESTS:
        error.__traceback__ = error.__context__ = None  # they would keep the body, which is counted no more
        await request.app.state.refusals.keep(caller_of(request))
    return reply(problem, identity)


def problem_of(request: Request, error: Exception) -> Problem:
    """The one table from errors to problems."""
    match error:
        case Problem():
            return error
        case PayloadError(code=code, detail=detail):
            return Problem(code, detail)
        case InputError():
            return Problem("invalid_request", str(error))
        case UnusableState():
            return Problem("state_corrupt", f"{error}; {_WAY_OUT}")
        case StateError():
            return _of_state(error)
        case HTTPException():
            return _of_framework(request, error)
        case RequestValidationError():
            found = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
            return Problem("invalid_request", "; ".join(found))
        case ClientDisconnect():
            return Problem("malformed_body", "the caller hung up before the body was complete")
        case _:
            detail = "the service failed on this request; its log has the details under this request id"
            return Problem("internal", detail, "unknown")


def failure_of(request: Request, error: Exception) -> Mapping[str, Any]:
    """What is said of one client of several that failed; the log keeps what callers are not told."""
    problem = problem_of(request, error)
    if problem.code in ("internal", "step_failed"):
        _log.error("request %s failed for one client of several", request.state.request_id, exc_info=error)
    return {"code": problem.code, "detail": problem.detail, "state_committed": problem.committed}


_WAY_OUT: Final = (
    "if a newer release wrote it, a replica of that one goes on; else only a reset or a DELETE of the client helps"
)
"""With a stored state that cannot be used."""

_OF_STATE: Final[Mapping[type[StateError], str]] = {
    ClientDeleted: "client_deleted",
    ClientUnknown: "client_unknown",
    Contended: "conflict",
    JournalFull: "journal_full",
    KeyReused: "key_reused",
    KeyUsedBeforeDelete: "key_used_before_delete",
    OtherModel: "other_model",
    OutOfOrder: "out_of_order",
    Paused: "conflict",
    VersionUnknown: "version_unknown",
}
"""Errors of the state protocol whose words are for callers."""


def _of_state(error: StateError) -> Problem:
    match error:
        case ForeignValue():
            detail = "Redis has a value of another type under a key of this client; only a DELETE of the client helps"
            return Problem("state_corrupt", detail, error.committed)
        case StateCorrupt() | StateUnreadable():
            code = "state_corrupt" if isinstance(error, StateCorrupt) else "state_unreadable"
            return Problem(code, f"{error}; {_WAY_OUT}", error.committed)
        case StepFailed(__cause__=InputError() as cause):
            return Problem("invalid_request", str(cause), error.committed)
        case StepFailed(__cause__=Problem() as cause):
            return Problem(cause.code, f"the step was given up half way: {cause}", error.committed, cause.headers)
        case StepFailed(__cause__=UnusableState() as cause):
            return Problem("state_corrupt", f"{cause}; {_WAY_OUT}", error.committed)
        case StepFailed():
            return Problem("step_failed", f"{error}; the log has the details", error.committed)
        case RequestRunning(retry_after_ms=wait):
            headers = {"Retry-After": str(max(1, math.ceil(wait / 1000)))}
            return Problem("request_running", f"{error}; ask again", error.committed, headers)
        case RateExceeded(left=left, quota=quota, window_s=window, wait_s=wait):
            # draft-ietf-httpapi-ratelimit-headers-10
            headers = {
                "Retry-After": str(math.ceil(wait)),
                "RateLimit": f'"images";r={left};t={math.ceil(wait)}',
                "RateLimit-Policy": f'"images";q={quota};w={window}',
            }
            return Problem("rate_exceeded", str(error), error.committed, headers)
        case TooManyClients(most=most):
            headers = {"RateLimit": '"clients";r=0', "RateLimit-Policy": f'"clients";q={most}'}
            return Problem("store_full", str(error), error.committed, headers)
        case TooManyBytes(left=left, most=most):
            headers = {"RateLimit": f'"bytes";r={left}', "RateLimit-Policy": f'"bytes";q={most}'}
            return Problem("store_full", str(error), error.committed, headers)
        case StoreFull():
            return Problem("store_full", "the state store has no memory left for this change", error.committed)
    code = _OF_STATE.get(type(error), "store_unavailable")
    away = "the state store does not answer or takes no changes now"
    return Problem(code, away if code == "store_unavailable" else str(error), error.committed)


def _of_framework(request: Request, error: HTTPException) -> Problem:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return Problem("not_found", f"there is nothing at {path[:200]}{_hint(path, request.app.state.models)}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed(request)
        detail = f"{request.method[:20]} is not accepted at {path[:200]}; use {allowed}"
        return Problem("method_not_allowed", detail, headers={"Allow": allowed})
    return Problem("malformed_body", str(error.detail))


def _hint(path: str, models: Sequence[str]) -> str:
    """What may be wrong with a path at which there is nothing."""
    root, _, rest = path.removeprefix("/").partition("/")
    if root == "models":
        name, _, rest = rest.partition("/")
        if name not in models:
            return f"; served are {', '.join(models)}"
        root, _, rest = rest.partition("/")
    return "; a client id holds no '/'" if root == "clients" and rest else ""


def _allowed(request: Request) -> str:
    """Methods of all routes of this path; the framework names those of the first alone."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
