"""Clients: look at one, choose its adapter, export and import its state, reset it, remove it."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_adapters import ConfigurationError, create
from acclimate_service.clients.requests import Precondition, etag
from acclimate_service.compute.adapters import canonical
from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext, json, model_of
from acclimate_service.http.identity import client_scope
from acclimate_service.service import Service

_LONGEST_CONFIGURATION = 65_536  # bytes
_STATE_TYPE = "application/octet-stream"
_STATE_DOC = {"requestBody": {"required": True, "content": {_STATE_TYPE: {}}}}
_CONFIGURATION_DOC = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["adapter"],
                    "properties": {"adapter": {"type": "string"}, "hyperparameters": {"type": "object"}},
                    "additionalProperties": False,
                }
            }
        },
    }
}


def add_routes(router: APIRouter, service: Service) -> None:
    """Add the routes of a client."""

    async def describe(client_id: str) -> Response:
        """Adapter of a client, and version, size and place of its state."""
        client = client_scope(client_id, service.settings.tenant)
        described = await service.clients.describe(client)
        state = {**described.state, "durability": service.store_facts.durability}
        guard = await service.feedback.of_client(client, described.configuration)
        body = {
            "client_id": client_id,
            "model": model_of(service),
            **service.configurations.describe(described.configuration),
        }
        return json({**body, "state": state, "guard": guard})

    async def configure(request: Request, client_id: str) -> Response:
        """Choose the client's adapter, which begins again unless it is the one that the client has."""
        context = RequestContext(service, request, client_id)

        def parse(body: bytes) -> tuple[str, tuple[bytes, ...]]:
            configuration = _read_configuration(body)
            return configuration, (b"configure", configuration.encode())

        wanted, configuration = await context.take(_LONGEST_CONFIGURATION, parse)
        return context.reply(await service.clients.configure(wanted, configuration))

    async def reset(request: Request, client_id: str) -> Response:
        """Take a client back to the global model."""
        context = RequestContext(service, request, client_id)
        return context.reply(await service.clients.reset(context.request(b"reset")))

    async def delete(request: Request, client_id: str) -> Response:
        """Remove a client and all that was learned for it."""
        context = RequestContext(service, request, client_id, keyed=False)
        await service.clients.delete(context.request(b"delete"))
        return Response(status_code=204)

    async def export_state(request: Request, client_id: str) -> Response:
        """The client's state as safetensors; the ETag is its version."""
        context = RequestContext(service, request, client_id, keyed=False)
        state = await service.clients.export_state(context.request(b"export"))
        return Response(state.data, headers={"ETag": etag(state.version)}, media_type=_STATE_TYPE)

    async def import_state(request: Request, client_id: str) -> Response:
        """Let the client go on from an exported state; `If-Match` names the version that may be replaced."""
        if request.headers.get("content-type", _STATE_TYPE).partition(";")[0].strip().lower() != _STATE_TYPE:
            raise Problem("unsupported_media_type", f"a state is sent as {_STATE_TYPE}")
        precondition = Precondition.parse(request.headers.get("if-match"))
        context = RequestContext(service, request, client_id)
        with service.admission.batches.hold(client_id):
            limit = service.settings.max_state_bytes
            wanted, data = await context.take(limit, lambda body: (body, (b"import", body)))
            return context.reply(await service.clients.import_state(wanted, data, precondition))

    path = "/clients/{client_id}"
    router.add_api_route(path, describe, methods=["GET"])
    router.add_api_route(path, configure, methods=["PUT"], openapi_extra=_CONFIGURATION_DOC)
    router.add_api_route(path, delete, methods=["DELETE"], status_code=204)
    router.add_api_route(f"{path}/reset", reset, methods=["POST"])
    router.add_api_route(f"{path}/state", export_state, methods=["GET"])
    router.add_api_route(f"{path}/state", import_state, methods=["PUT"], openapi_extra=_STATE_DOC)


def _read_configuration(body: bytes) -> str:
    """The configuration that a body asks for, once the adapter takes it.

    Raises:
        Problem: `malformed_body`, or `invalid_configuration` with what is accepted.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem("malformed_body", f"the body is not valid JSON: {error}") from error
    adapter, hyperparameters = _members(document)
    try:
        create(adapter, **hyperparameters)
    except ConfigurationError as error:
        detail = f"{error}; GET /adapters describes every adapter and its hyper-parameters"
        raise Problem("invalid_configuration", detail) from error
    return canonical(adapter, hyperparameters)


def _members(document: Any) -> tuple[str, dict[str, Any]]:
    form = '{"adapter": "<name>", "hyperparameters": {"<name>": <value>}}'
    if not isinstance(document, dict) or not isinstance(document.get("adapter"), str):
        raise Problem("invalid_configuration", f"the body must be an object: {form}")
    hyperparameters = document.get("hyperparameters", {})
    unknown = document.keys() - {"adapter", "hyperparameters"}
    if unknown or not isinstance(hyperparameters, dict):
        raise Problem("invalid_configuration", f"the body must be an object of these members only: {form}")
    return document["adapter"], hyperparameters
