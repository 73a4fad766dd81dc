"""What happens to every request: a request id, its time and outcome counted, and an answer even when it fails."""

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acclimate_service.http import problems
from acclimate_service.http.identity import request_id
from acclimate_service.metrics import Metrics


class RequestMiddleware:
    """Pure ASGI, so that the handlers below still see when a caller disconnects."""

    def __init__(self, app: ASGIApp, metrics: Metrics, draining: Callable[[], bool]) -> None:
        """While `draining`, every reply ends its connection, so that balancers do not send into one that is closed."""
        self._app = app
        self._metrics = metrics
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        identity = request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = identity
        status: int | None = None
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identity
                if self._draining():
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
            self._metrics.requests.labels(route, str(status or 500)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)
