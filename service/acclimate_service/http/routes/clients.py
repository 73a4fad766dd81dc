"""Clients: look at one, choose its adapter, take it back to the global model, remove it."""

from typing import Any

import orjson
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from acclimate_adapters import ConfigurationError, create
from acclimate_service.compute.configuration import canonical
from acclimate_service.errors import Problem
from acclimate_service.http.routes.desk import Desk, json

_LONGEST_CONFIGURATION = 65_536  # bytes
_DOC = {
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


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes of a client."""
    service = desk.service

    async def describe(client_id: str) -> Response:
        """Adapter of a client, and version, size and place of its state."""
        client = desk.scope(client_id)
        described = await service.clients.describe(client)
        state = {**described.state, "durability": service.store_facts.durability}
        guard = await service.feedback.of_client(client, described.configuration)
        body = {"client_id": client_id, "model": desk.model, **service.configurations.describe(described.configuration)}
        return json({**body, "state": state, "guard": guard})

    async def configure(request: HttpRequest, client_id: str) -> Response:
        """Choose the client's adapter, which begins anew unless it is the one that the client has."""

        def parse(body: bytes) -> tuple[str, tuple[bytes, ...]]:
            configuration = _read_configuration(body)
            return configuration, (b"configure", configuration.encode())

        wanted, configuration = await desk.take(request, client_id, _LONGEST_CONFIGURATION, parse)
        return desk.reply(await service.clients.configure(wanted, configuration), wanted)

    async def reset(request: HttpRequest, client_id: str) -> Response:
        """Take a client back to the global model."""
        wanted = desk.request(request, client_id, b"reset")
        return desk.reply(await service.clients.reset(wanted), wanted)

    async def delete(request: HttpRequest, client_id: str) -> Response:
        """Remove a client and all that was learned for it."""
        await service.clients.delete(desk.request(request, client_id, b"delete", keyed=False))
        return Response(status_code=204)

    path = "/clients/{client_id}"
    router.add_api_route(path, describe, methods=["GET"])
    router.add_api_route(path, configure, methods=["PUT"], openapi_extra=_DOC)
    router.add_api_route(path, delete, methods=["DELETE"], status_code=204)
    router.add_api_route(f"{path}/reset", reset, methods=["POST"])


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
