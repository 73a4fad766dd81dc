"""Clients: look at one, choose its adapter, export and import its state, reset it, remove it."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_adapters import ConfigurationError
from acclimate_service.clients.clients import Wanted, adaptation
from acclimate_service.clients.requests import Precondition, etag
from acclimate_service.compute.adapters import Configurations
from acclimate_service.errors import Problem
from acclimate_service.http.context import Intake, RequestContext, json
from acclimate_service.http.payload import load_json, media_type, unsupported

_LONGEST_CONFIGURATION = 65_536  # bytes
_LONGEST_ROLLBACK = 1024  # bytes
_LARGEST_VERSION = 2**53 - 1
_STATE_TYPE = "application/octet-stream"
_STATE_DOC = {"requestBody": {"required": True, "content": {_STATE_TYPE: {}}}}
_ROLLBACK_DOC = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"version": {"type": "integer", "minimum": 1, "maximum": _LARGEST_VERSION}},
                    "additionalProperties": False,
                }
            }
        }
    }
}
_ADAPTATION = {"running": False, "paused": True}
_CONFIGURATION_DOC = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "minProperties": 1,
                    "properties": {
                        "adapter": {"type": "string"},
                        "hyperparameters": {"type": "object"},
                        "adaptation": {"enum": list(_ADAPTATION)},
                    },
                    "dependentRequired": {"hyperparameters": ["adapter"]},
                    "additionalProperties": False,
                }
            }
        },
    }
}


class ClientRoutes:
    """The handlers of the routes of one model's clients.

    Args:
        intake: of the model.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._service = intake.service

    async def describe(self, request: Request, client_id: str) -> Response:
        """Adapter of a client, and version, size and place of its state."""
        context = RequestContext(self._intake, request, client_id, keyed=False, query=None)
        described = await self._service.clients.describe(context.client)
        state = {**described.state, "durability": self._service.probe.facts.durability}
        guard = await self._service.feedback.of_client(await context.request(b"describe"), described.configuration)
        body = {
            "client_id": client_id,
            "model": self._intake.model,
            **self._service.configurations.describe(described.configuration),
            "adaptation": adaptation(described.paused),
        }
        return json({**body, "state": state, "guard": guard})

    async def configure(self, request: Request, client_id: str) -> Response:
        """Choose the client's adapter, which restarts unless it is the one that the client has; pause it, or go on."""
        context = RequestContext(self._intake, request, client_id)
        if media_type(context.content_type) != "application/json":
            raise unsupported(context.content_type, ("application/json",))
        with context.admitted():
            body = await context.body(_LONGEST_CONFIGURATION)
            wanted = await context.computed(partial(_read_wanted, body, self._service.configurations))
            said = [(wanted.configuration or "").encode()]
            if wanted.paused is not None:
                said.append(adaptation(wanted.paused).encode())
            asked = await context.request(b"configure", *said)
            return context.reply(await self._service.clients.configure(asked, wanted))

    async def reset(self, request: Request, client_id: str) -> Response:
        """Take a client back to the global model."""
        context = RequestContext(self._intake, request, client_id)
        with context.admitted():
            return context.reply(await self._service.clients.reset(await context.request(b"reset")))

    async def roll_back(self, request: Request, client_id: str) -> Response:
        """Let a client go on from an earlier state that is kept: of the version named, or the newest."""
        context = RequestContext(self._intake, request, client_id)
        with context.admitted():
            body = await context.body(_LONGEST_ROLLBACK)
            if body and media_type(context.content_type) != "application/json":
                raise unsupported(context.content_type, ("application/json",))
            version = _read_version(body)
            asked = await context.request(b"rollback", f"{version}".encode())
            return context.reply(await self._service.clients.roll_back(asked, version))

    async def delete(self, request: Request, client_id: str) -> Response:
        """Remove a client and all that was learned for it."""
        context = RequestContext(self._intake, request, client_id, keyed=False)
        with context.admitted():
            await self._service.clients.delete(await context.request(b"delete"))
            return Response(status_code=204)

    async def export_state(self, request: Request, client_id: str) -> Response:
        """The client's state as safetensors; the ETag is its version."""
        context = RequestContext(self._intake, request, client_id, keyed=False, query=None)
        with context.admitted():
            state = await self._service.clients.export_state(await context.request(b"export"))
            return context.reply_bytes(state.data, {"ETag": etag(state.version)})

    async def import_state(self, request: Request, client_id: str) -> Response:
        """Let the client go on from an exported state; `If-Match` names the version that may be replaced."""
        context = RequestContext(self._intake, request, client_id)
        if not self._service.settings.import_:
            raise Problem("import_off", "ACCLIMATE_IMPORT is off: states are taken out here, none is put in")
        if context.content_type and media_type(context.content_type) != _STATE_TYPE:
            raise unsupported(context.content_type, (_STATE_TYPE,))
        precondition = Precondition.parse(context.headers.get("if-match"))
        with context.admitted():
            data = await context.body(self._service.settings.max_state_bytes)
            wanted = await context.request(b"import", data)
            return context.reply(await self._service.clients.import_state(wanted, data, precondition))


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes of a client."""
    handlers, path = ClientRoutes(intake), "/clients/{client_id}"
    router.add_api_route(path, handlers.describe, methods=["GET"])
    router.add_api_route(path, handlers.configure, methods=["PUT"], openapi_extra=_CONFIGURATION_DOC)
    router.add_api_route(path, handlers.delete, methods=["DELETE"], status_code=204)
    router.add_api_route(f"{path}/reset", handlers.reset, methods=["POST"])
    router.add_api_route(f"{path}/rollback", handlers.roll_back, methods=["POST"], openapi_extra=_ROLLBACK_DOC)
    router.add_api_route(f"{path}/state", handlers.export_state, methods=["GET"])
    router.add_api_route(f"{path}/state", handlers.import_state, methods=["PUT"], openapi_extra=_STATE_DOC)


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
