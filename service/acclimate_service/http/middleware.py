"""What happens to every request: an id, its time and outcome counted, an answer even when it fails; pages kept out."""

import ipaddress
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acclimate_service import ui
from acclimate_service.errors import Problem
from acclimate_service.http import problems
from acclimate_service.keys import STRANGER, Caller
from acclimate_service.logs import ACCESS, hashed, note_request
from acclimate_service.metrics import MOST_SPELLS, SPELLS, Metrics, Spell, seconds_of
from acclimate_service.tracing import Tracing

_SAFE: Final = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""Headers of every reply: it is nobody's page, and nobody keeps it or takes it for something else."""
_NO_PAGE: Final = (*_SAFE, (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"))
"""Those of all replies but the pages."""
_PAGES: Final = {"/docs": _SAFE, "/ui": (*_SAFE, (b"content-security-policy", ui.POLICY.encode()))}
_FAILED: Final = 500
"""From this status on, it was the service that failed."""
_PROBES: Final = "/ready"
"""How paths end whose 503 is an answer, asked for every second or so: no failure of theirs."""
_SOUND_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Replica(Protocol):
    """What is asked of the service; while it is `draining`, every reply ends its connection."""

    metrics: Metrics
    draining: bool


class RequestMiddleware:
    """Pure ASGI, so that the handlers below still see when a caller disconnects.

    HEAD is answered as GET is; the server leaves out the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        replica: Replica,
        caller: Caller = STRANGER,
        secret: str = "",
        tracing: Tracing | None = None,
        root_path: str = "",
    ) -> None:
        """Answer requests for a replica.

        Args:
            app: what answers.
            replica: whose metrics count it.
            caller: whom requests are from until it is known who calls.
            secret: by which clients are hashed in the log, and in traces.
            tracing: told of every request; None where nobody wants traces.
            root_path: what a proxy may have left before the paths.
        """
        self._app = app
        self._replica = replica
        self._caller = caller
        self._secret = secret
        self._tracing = tracing
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        identity = uuid.uuid4().hex  # labels name rows by it, so no other request may have it
        caller = Headers(scope=scope).get("x-request-id")  # for logs: many requests may have the same
        if caller is not None and not _SOUND_ID.fullmatch(caller):
            caller = None
        spells = deque[Spell](maxlen=MOST_SPELLS)
        state = {"request_id": identity, "caller_request_id": caller, "caller": self._caller, "model": ""}
        scope.setdefault("state", {}).update(state)
        SPELLS.set(spells)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        status: int | None = None
        spent: dict[str, float] = {}
        safe = _PAGES.get(scope["path"], _NO_PAGE)
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, spent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *safe]}  # a reply may be sent many times
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identity
                if caller is not None:
                    headers["X-Caller-Request-Id"] = caller
                spent = seconds_of(spells)
                shown = [*spent.items(), ("total", time.monotonic() - began)]
                headers["Server-Timing"] = ", ".join([f"{name};dur={1000 * each:.2f}" for name, each in shown])
                if self._replica.draining:  # so that balancers do not send into a connection that is closed
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:
                raise
            reply = await problems.answer(Request(scope), error)
            await reply(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            seconds = time.monotonic() - began
            metrics, model = self._replica.metrics, scope["state"]["model"]
            metrics.requests.labels(scope["method"], route, model, str(status or 500)).inc()
            metrics.request_seconds.labels(scope["method"], route, model).observe(seconds)
            for phase, each in spent.items():
                metrics.phase_seconds[phase].observe(each)
            failed = (status or 500) >= _FAILED and not route.endswith(_PROBES)
            level = logging.WARNING if failed else logging.INFO
            if self._tracing is not None or ACCESS.isEnabledFor(level):
                asked, ids = (scope["method"], route, status or 500), self._ids(scope)
                if self._tracing is not None:
                    ids["trace_id"] = self._tracing.note_request(Headers(scope=scope), *asked, began, spells, ids)
                note_request(level, *asked, seconds, ids)

    def _ids(self, scope: Scope) -> dict[str, str]:
        """What a request is known by in the log and in traces; the client by its hash."""
        state, client = scope["state"], scope.get("path_params", {}).get("client_id", "")
        tenant = state["caller"].tenant
        named = f"{tenant}/{client}" if tenant and client else client
        ids = {
            "client": hashed(self._secret, named) if named else "",
            "request_id": state["request_id"],
            "caller_request_id": state["caller_request_id"] or "",
            "tenant": tenant,
            "key": state["caller"].key,
            "model": state["model"],
        }
        return {name: value for name, value in ids.items() if value}


class DirectRoute(APIRoute):
    """A route whose handler is called at once where there is nothing to be read for it but texts of the path.

    Elsewhere FastAPI reads the parameters, and everywhere it describes them. Its way to a handler takes an eighth of
    the time that the event loop has with a batch. What a handler raises is answered by the application in either case.
    """

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        known, self._read = self.dependant, self.app
        self._request = known.request_param_name
        self._texts = [each.name for each in known.path_params]
        self._defaults = {each.name: each.default for each in known.query_params}
        plain = all(each.field_info.annotation is str for each in known.path_params)
        further = known.body_params or known.header_params or known.cookie_params or known.dependencies
        if iscoroutinefunction(self.endpoint) and plain and not further:
            self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            return await self._read(scope, receive, send)
        given = {**self._defaults, **{name: scope["path_params"][name] for name in self._texts}}
        if self._request:
            given[self._request] = Request(scope, receive, send)
        reply = await self.endpoint(**given)
        await reply(scope, receive, send)


class SiteMiddleware:
    """Refuses what web pages of other sites have browsers send, and names that are not the service's own.

    A page can have its visitor's browser post forms and text to any address, and read the answers of a name that it
    makes point there (DNS rebinding). Callers that are no browsers send neither Origin nor Sec-Fetch-Site.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """Guard the application.

        Args:
            app: what answers.
            hosts: names that are answered, `*.example` with all below `example`, `*` for any; empty: names of the
                machine itself.
            origins: whose pages may use the service; `*` for all.
        """
        self._app = app
        self._hosts = tuple(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            hosts = headers.getlist("host")
            if len(hosts) > 1 or (hosts and not _answers(self._hosts, hosts[0])):
                raise _not_our_host(hosts)
            if ("origin" in headers or "sec-fetch-site" in headers) and "*" not in self._origins:
                self._check_site(headers, scope["method"])
        await self._app(scope, receive, send)

    def _check_site(self, headers: Headers, method: str) -> None:
        origins = headers.getlist("origin")
        foreign = [origin for origin in origins if not self._allows(origin, headers.get("host", ""))]
        linked = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # a page that somebody opens
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and not origins and not linked):
            site = repr(foreign[0][:80]) if foreign else "another site"
            detail = f"web pages of {site} may not use this service; ACCLIMATE_CORS_ORIGINS names those that may"
            raise Problem("origin_not_allowed", detail)

    def _allows(self, origin: str, host: str) -> bool:
        if origin in self._origins:
            return True
        scheme, _, place = origin.lower().partition("://")
        port = {"http": ":80", "https": ":443"}.get(scheme)
        return port is not None and place.removesuffix(port) == host.lower().removesuffix(port) != ""


def _not_our_host(hosts: Sequence[str]) -> Problem:
    if len(hosts) > 1:
        return Problem("malformed_request", "the header Host is there more than once")
    detail = f"this service does not answer as {hosts[0][:80]!r}; ACCLIMATE_ALLOWED_HOSTS names its hosts"
    return Problem("host_not_allowed", detail)


@lru_cache(maxsize=256)
def _answers(hosts: tuple[str, ...], host: str) -> bool:
    """Whether a Host header names one of these hosts."""
    name = _name(host)
    if not hosts:
        return is_loopback(name)
    return any(each in ("*", name) or (each.startswith("*.") and name.endswith(each[1:])) for each in hosts)


def _name(host: str) -> str:
    """The name or address of a Host header, without its port; empty if it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether only the machine itself can be meant by a name or address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def hosts_of(names: Sequence[str], address: str) -> Sequence[str]:
    """Which hosts are answered, given the setting and the address that the service listens on."""
    return names or (() if is_loopback(address) else ("*",))
