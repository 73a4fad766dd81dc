"""Who may do what: one table of all routes, and the middleware and the routes that hold to it."""

import re
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from acclimate_service import ui
from acclimate_service.errors import Problem
from acclimate_service.http import problems
from acclimate_service.http.middleware import DirectRoute
from acclimate_service.keys import ANY_KEY, ANYBODY, STRANGER, Caller, Keys

NEEDS: Final = {
    "POST /clients/{client_id}/predict": "predict",
    "POST /clients/{client_id}/feedback": "predict",
    "GET /clients": "read",
    "GET /clients/{client_id}": "read",
    "GET /clients/{client_id}/asks": "read",
    "GET /clients/{client_id}/images": "read",
    "GET /clients/{client_id}/state": "read",
    "GET /clients/{client_id}/timeline": "read",
    "GET /clients/{client_id}/timeline/live": "read",
    "GET /states": "read",
    "GET /models/{model}/states": "read",
    "DELETE /clients": "write",
    "PUT /clients/{client_id}": "write",
    "DELETE /clients/{client_id}": "write",
    "POST /clients/{client_id}/enroll": "write",
    "POST /clients/{client_id}/reset": "write",
    "POST /clients/{client_id}/rollback": "write",
    "PUT /clients/{client_id}/state": "write",
    "GET /asks": "read",
    "GET /models/{model}/asks": "read",
    "GET /models": ANY_KEY,
    "GET /adapters": ANY_KEY,
    "GET /models/{model}/adapters": "admin",
    "GET /models/{model}/rollout": "admin",
    "PUT /models/{model}/rollout": "admin",
    "GET /metrics": "admin",
    "GET /replicas": "admin",
    "GET /models/{model}/manifest": ANY_KEY,
    "GET /v2": ANY_KEY,
    "GET /v2/models/stats": "admin",
    "POST /v2/repository/index": ANY_KEY,
    "POST /v2/repository/models/{model}/load": "admin",
    "POST /v2/repository/models/{model}/unload": "admin",
    "GET /v2/models/{model}": ANY_KEY,
    "GET /v2/models/{model}/config": ANY_KEY,
    "GET /v2/models/{model}/ready": ANY_KEY,
    "GET /v2/models/{model}/stats": "admin",
    "POST /v2/models/{model}/infer": "predict",
    "GET /v2/models/{model}/versions/{version}": ANY_KEY,
    "GET /v2/models/{model}/versions/{version}/config": ANY_KEY,
    "GET /v2/models/{model}/versions/{version}/ready": ANY_KEY,
    "GET /v2/models/{model}/versions/{version}/stats": "admin",
    "POST /v2/models/{model}/versions/{version}/infer": "predict",
    "GET /v2/health/live": ANYBODY,
    "GET /v2/health/ready": ANYBODY,
}
"""What a key must be good for, for every route; those of a model by its name are those of the default one."""
_PAGES: Final = (
    *ui.PATHS,
    "/docs",
    "/docs/swagger-ui-bundle.js",
    "/docs/swagger-ui.css",
    "/docs/favicon.png",
    "/openapi.json",
)
_OPEN: Final = frozenset((*(name.partition(" ")[2] for name, need in NEEDS.items() if need == ANYBODY), *_PAGES))
_OF_MODEL: Final = re.compile(r"^/models/[^/]+(?=/)")
_BEARER: Final = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="acclimate"'}
_INVALID: Final = {"WWW-Authenticate": 'Bearer realm="acclimate", error="invalid_token"'}
_MISSING: Final = "this service asks for a key: send it as `Authorization: Bearer acclimate_...`"
_WRONG: Final = "this is no key that is valid now; send one as `Authorization: Bearer acclimate_...`"


def need_of(method: str, path: str) -> str:
    """What a key must be good for, by the method and the path of a route.

    Raises:
        LookupError: nobody has decided that.
    """
    route = _OF_MODEL.sub("/models/{model}", path, count=1).replace("/models/{model}/clients", "/clients")
    try:
        return NEEDS[f"{method} {route}"]
    except KeyError:
        raise LookupError(f"say in http/access.py what a key must be good for: {method} {route}") from None


class DecidedRoute(DirectRoute):
    """A route of which it is known what a key must be good for; without an entry in `NEEDS` it cannot be made.

    Every key is good for those that are not described: they say that there is nothing.
    """

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        self.needs = {
            method: need_of(method, path) if self.include_in_schema else ANY_KEY for method in self.methods or ()
        }


class KeyedRoute(DecidedRoute):
    """One that asks for it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, if its caller may have the answer; 403 else."""
        need, caller = self.needs.get(scope["method"], ANYBODY), scope["state"]["caller"]
        if need not in caller.rights:
            raise Problem("scope_missing", f"the key {caller.key} is not good for this; it takes one with scope {need}")
        await super().handle(scope, receive, send)


class KeyMiddleware:
    """Finds out who calls, as `state.caller` of the request, and turns away who has no key where one is needed.

    Args:
        app: what answers.
        keys: of all callers.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it: its body is not read before."""
        app: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                scope["state"]["caller"] = _caller(self._keys, scope)
            except Problem as problem:
                app = await problems.answer(Request(scope), problem)
        await app(scope, receive, send)


def _caller(keys: Keys, scope: Scope) -> Caller:
    given = Headers(scope=scope).getlist("authorization")
    if not given:
        if scope["path"] in _OPEN:
            return STRANGER
        raise Problem("unauthorized", _MISSING, headers=_CHALLENGE)
    found = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
    caller = keys.caller(found[1]) if found else None
    if caller is None:
        raise Problem("unauthorized", _WRONG, headers=_INVALID)
    return caller
