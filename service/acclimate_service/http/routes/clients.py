"""Clients: list them, look at one, choose its adapter, export and import its state, reset it, remove it."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from acclimate_adapters import ConfigurationError
from acclimate_service.clients.clients import Wanted, adaptation
from acclimate_service.clients.requests import Precondition, etag
from acclimate_service.clients.roster import Page
from acclimate_service.clients.roster import Wanted as WantedClients
from acclimate_service.compute.adapters import Configurations
from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import BYTES, CHANGING, ClientId, Content, Time, add_route, bytes_of, json_of
from acclimate_service.http.payload import load_json, media_type, unsupported
from acclimate_service.http.replies import json
from acclimate_service.http.schemas import sent
from acclimate_service.http.schemas.clients import Client, Clients
from acclimate_service.http.schemas.common import Change, Configured, Rollback, Verdict
from acclimate_service.state import StaleCursor

_LONGEST_CONFIGURATION = 65_536  # bytes
_LONGEST_ROLLBACK = 1024  # bytes
_LARGEST_VERSION = 2**53 - 1
SMALLEST_PAGE, LARGEST_PAGE = 10, 1000
"""Clients; Redis tells some keys at a time that cannot be told apart, which are few, but more than one."""
PAGE: Final = 100
FILTERS: Final = ("adapter", "active_since", "verdict")
"""Parameters that say which clients are meant."""
Handler: TypeAlias = Callable[..., Awaitable[Response]]
_ADAPTATION = {"running": False, "paused": True}


class ClientRoutes:
    """The handlers of the routes of one model's clients.

    Args:
        intake: of the model.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def list(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=SMALLEST_PAGE, le=LARGEST_PAGE)] = PAGE,
        cursor: Annotated[str, Query(max_length=64)] = "",
        adapter: Annotated[str | None, Query(max_length=64)] = None,
        active_since: Time | None = None,
        verdict: Verdict | None = None,
    ) -> Response:
        """Clients that have a state, in no order; `next` leads on, also where a page has fewer than `limit` or none."""
        context = RequestContext(self._intake, request, None, keyed=False, query=("limit", "cursor", *FILTERS))
        wanted = WantedClients.of(adapter, active_since, verdict)
        with context.admitted():
            page = await page_of(context, wanted, limit, cursor)
            taken = await context.service.places.usage(context.caller().tenant)
        usage = {
            "clients": taken.clients,
            "most_clients": taken.most_clients,
            "bytes": taken.nbytes,
            "most_bytes": taken.most_bytes,
        }
        model = context.service.model
        return json({"model": model, "clients": page.clients, "usage": usage, "next": page.cursor})

    async def describe(self, request: Request, client_id: ClientId) -> Response:
        """Adapter of a client, and version, size and place of its state."""
        context = RequestContext(self._intake, request, client_id, keyed=False, query=None)
        described = await context.service.clients.describe(context.client)
        state = {**described.state, "durability": context.service.probe.facts.durability}
        guard = await context.service.feedback.of_client(await context.request(b"describe"), described.configuration)
        body = {
            "client_id": client_id,
            "model": context.service.model,
            **context.service.configurations.describe(described.configuration),
            "adaptation": adaptation(described.paused),
        }
        return json({**body, "state": state, "guard": guard})

    async def configure(self, request: Request, client_id: ClientId) -> Response:
        """Choose the client's adapter, which restarts unless it is the one that the client has; pause it, or go on."""
        context = RequestContext(self._intake, request, client_id)
        if media_type(context.content_type) != "application/json":
            raise unsupported(context.content_type, ("application/json",))
        with context.admitted():
            body = await context.body(_LONGEST_CONFIGURATION)
            wanted = await context.computed(partial(_read_wanted, body, context.service.configurations))
            said = [(wanted.configuration or "").encode()]
            if wanted.paused is not None:
                said.append(adaptation(wanted.paused).encode())
            asked = await context.request(b"configure", *said)
            return context.reply(await context.service.clients.configure(asked, wanted))

    async def reset(self, request: Request, client_id: ClientId) -> Response:
        """Take a client back to the global model."""
        context = RequestContext(self._intake, request, client_id)
        with context.admitted():
            return context.reply(await context.service.clients.reset(await context.request(b"reset")))

    async def roll_back(self, request: Request, client_id: ClientId) -> Response:
        """Let a client go on from an earlier state that is kept: of the version named, or the newest."""
        context = RequestContext(self._intake, request, client_id)
        with context.admitted():
            body = await context.body(_LONGEST_ROLLBACK)
            if body and media_type(context.content_type) != "application/json":
                raise unsupported(context.content_type, ("application/json",))
            version = _read_version(body)
            asked = await context.request(b"rollback", f"{version}".encode())
            return context.reply(await context.service.clients.roll_back(asked, version))

    async def delete(self, request: Request, client_id: ClientId) -> Response:
        """Remove a client and all that was learned for it."""
        context = RequestContext(self._intake, request, client_id, keyed=False)
        with context.admitted():
            await context.service.clients.delete(await context.request(b"delete"))
            return Response(status_code=204)

    async def export_state(self, request: Request, client_id: ClientId) -> Response:
        """The client's state as safetensors; the ETag is its version."""
        context = RequestContext(self._intake, request, client_id, keyed=False, query=None)
        with context.admitted():
            state = await context.service.clients.export_state(await context.request(b"export"))
            return context.reply_bytes(state.data, {"ETag": etag(state.version)})

    async def import_state(self, request: Request, client_id: ClientId) -> Response:
        """Let the client go on from an exported state; `If-Match` names the version that may be replaced."""
        context = RequestContext(self._intake, request, client_id)
        if not context.service.settings.import_:
            raise Problem("import_off", "ACCLIMATE_IMPORT is off: states are taken out here, none is put in")
        if context.content_type and media_type(context.content_type) != BYTES:
            raise unsupported(context.content_type, (BYTES,))
        precondition = Precondition.parse(context.headers.get("if-match"))
        with context.admitted():
            data = await context.body(context.service.settings.max_state_bytes)
            wanted = await context.request(b"import", data)
            return context.reply(await context.service.clients.import_state(wanted, data, precondition))


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes of a client."""
    handlers = ClientRoutes(intake)

    def add(method: str, suffix: str, handler: Handler, name: str, reply: Content | None, **more: Any) -> None:
        add_route(router, method, "/clients/{client_id}" + suffix, handler, name, "clients", reply, **more)

    def change(method: str, suffix: str, handler: Handler, name: str, reply: Content, **more: Any) -> None:
        add(method, suffix, handler, name, reply, **{"headers": CHANGING, **more})

    timed, back = CHANGING[1:], {"body": json_of(sent.Version), "body_required": False}
    put_in = {"body": bytes_of(), "headers": (*CHANGING, "If-Match")}
    add_route(router, "GET", "/clients", handlers.list, "list_clients", "clients", json_of(Clients))
    add("GET", "", handlers.describe, "describe_client", json_of(Client), headers=timed)
    change("PUT", "", handlers.configure, "configure_client", json_of(Configured), body=json_of(sent.Wanted))
    add("DELETE", "", handlers.delete, "delete_client", None, headers=timed)
    change("POST", "/reset", handlers.reset, "reset_client", json_of(Change))
    change("POST", "/rollback", handlers.roll_back, "roll_client_back", json_of(Rollback), **back)
    add("GET", "/state", handlers.export_state, "export_state", bytes_of(), headers=timed)
    change("PUT", "/state", handlers.import_state, "import_state", json_of(Change), **put_in)


async def page_of(context: RequestContext, wanted: WantedClients, limit: int, cursor: str) -> Page:
    """Some clients of whoever asks; raises Problem (`invalid_request`) for a cursor that leads nowhere."""
    try:
        return await context.service.roster.page(context.caller().tenant, wanted, limit, cursor)
    except StaleCursor as error:
        raise Problem("invalid_request", str(error)) from error


def _read_wanted(body: bytes, configurations: Configurations) -> Wanted:
    """What a body asks for, once the adapter takes it.

    Raises:
        PayloadError: as `load_json`.
        Problem: `invalid_configuration` with what is accepted.
    """
    adapter, hyperparameters, paused = _members(load_json(body))
    try:
        return Wanted(None if adapter is None else configurations.wanted(adapter, hyperparameters), paused)
    except ConfigurationError as error:
        detail = f"{error}; GET /adapters describes every adapter and its hyper-parameters"
        raise Problem("invalid_configuration", detail) from error


def _members(document: Any) -> tuple[str | None, dict[str, Any], bool | None]:
    form = '{"adapter": "<name>", "hyperparameters": {"<name>": <value>}, "adaptation": "running" or "paused"}'
    found = document if isinstance(document, dict) else {}
    if not isinstance(found.get("adapter"), str) and ("adapter" in found or "adaptation" not in found):
        raise Problem("invalid_configuration", f"the body must be an object with an adapter or adaptation: {form}")
    hyperparameters = found.get("hyperparameters", {})
    unknown = found.keys() - {"adapter", "hyperparameters", "adaptation"}
    if unknown or not isinstance(hyperparameters, dict):
        raise Problem("invalid_configuration", f"the body must be an object of these members only: {form}")
    if "hyperparameters" in found and "adapter" not in found:
        raise Problem("invalid_configuration", f"hyperparameters are those of an adapter, which must be named: {form}")
    if "adaptation" not in found:
        return found["adapter"], hyperparameters, None
    if found["adaptation"] not in tuple(_ADAPTATION):  # anything may stand there
        raise Problem("invalid_configuration", f'adaptation is "running" or "paused": {form}')
    return found.get("adapter"), hyperparameters, _ADAPTATION[found["adaptation"]]


def _read_version(body: bytes) -> int:
    """The version that a client is to go back to; 0 where none is named.

    Raises:
        PayloadError: as `load_json`.
        Problem: `invalid_request`.
    """
    document = load_json(body) if body else {}
    if not isinstance(document, dict) or document.keys() - {"version"}:
        raise Problem("invalid_request", 'the body must be empty, or an object with this member only: {"version": 5}')
    version: int = document.get("version", 0)
    if "version" in document and not (type(version) is int and 1 <= version <= _LARGEST_VERSION):
        raise Problem(
            "invalid_request", "version is that of a kept state, a whole number from 1; see GET /clients/{id}"
        )
    return version
