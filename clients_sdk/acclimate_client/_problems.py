"""What went wrong: problem documents and transport failures to errors. Nothing here sends or waits."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from acclimate_client.errors import PROBLEMS, AcclimateClientError, Committed, ConnectionFailed, ProblemError, Timeout

NEVER_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.LocalProtocolError,
    httpx.UnsupportedProtocol,
)
EXCERPT = 200  # characters of a foreign body quoted in a message


def from_httpx(error: httpx.RequestError) -> AcclimateClientError:
    """Returns the error of this package that a failure of the transport is raised as."""
    kind = Timeout if isinstance(error, httpx.TimeoutException) else ConnectionFailed
    reason = str(error) or type(error).__name__
    failure = kind(f"{error.request.method} {error.request.url}: {reason}")
    # A request that httpx itself refuses to send is wrong each time, e.g. a header with a line break.
    failure.retryable = not isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol)
    failure.state_committed = False if isinstance(error, NEVER_SENT) else "unknown"
    failure.__cause__ = error
    return failure


def problem(reply: httpx.Response) -> ProblemError:
    """Returns the error a reply stands for, also when it is a proxy's page and no problem document."""
    body = _problem_document(reply)
    code = body.get("code")
    retryable = body.get("retryable")
    return PROBLEMS.get(str(code), ProblemError)(
        code=str(code or f"http_{reply.status_code}"),
        status=reply.status_code,
        detail=str(body.get("detail") or reply.text[:EXCERPT].strip() or reply.reason_phrase),
        retryable=retryable if isinstance(retryable, bool) else _usually_retryable(reply.status_code),
        state_committed=committed(body.get("state_committed")),
        request_id=request_id(reply, body),
        retry_after=retry_after(reply.headers),
    )


def retry_after(headers: httpx.Headers) -> float | None:
    """Returns the seconds that a Retry-After header asks to wait, None without a usable one (RFC 9110, 10.2.3)."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, headers.get("Date", ""))
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def request_id(reply: httpx.Response, body: Mapping[str, Any]) -> str:
    """Returns the id the server logs the request under, "" if it gave none."""
    return str(body.get("request_id") or reply.headers.get("X-Request-Id", ""))


def committed(value: object) -> Committed:
    """Returns the member `state_committed` as it is, anything else than a truth value as "unknown"."""
    return value if isinstance(value, bool) else "unknown"


def _seconds_until(date: str, now: str) -> float:
    # The reply's own Date is the clock: an edge device's may be years off.
    try:
        return (parsedate_to_datetime(date) - parsedate_to_datetime(now)).total_seconds()
    except (ValueError, TypeError):
        return math.nan


def _problem_document(reply: httpx.Response) -> Mapping[str, Any]:
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) and isinstance(body.get("code"), str) else {}


def _usually_retryable(status: int) -> bool:
    return status in (408, 429) or status >= 500
