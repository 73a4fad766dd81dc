"""States of clients as bytes: exported and imported."""

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from acclimate_service.clients.imports import Precondition, etag
from acclimate_service.errors import Problem
from acclimate_service.http.routes.desk import Desk

_MEDIA_TYPE = "application/octet-stream"
_DOC = {"requestBody": {"required": True, "content": {_MEDIA_TYPE: {}}}}


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes of a client's state."""
    service = desk.service

    async def export_state(request: HttpRequest, client_id: str) -> Response:
        """The client's state as safetensors; the ETag is its version."""
        state = await service.clients.export_state(desk.request(request, client_id, b"export", keyed=False))
        return Response(state.data, headers={"ETag": etag(state.version)}, media_type=_MEDIA_TYPE)

    async def import_state(request: HttpRequest, client_id: str) -> Response:
        """Let the client go on from an exported state; `If-Match` names the version that may be replaced."""
        if request.headers.get("content-type", _MEDIA_TYPE).partition(";")[0].strip().lower() != _MEDIA_TYPE:
            raise Problem("unsupported_media_type", f"a state is sent as {_MEDIA_TYPE}")
        precondition = Precondition.parse(request.headers.get("if-match"))
        with service.engine.admission(client_id):
            limit = desk.settings.max_state_bytes
            wanted, data = await desk.take(request, client_id, limit, lambda body: (body, (b"import", body)))
            return desk.reply(await service.clients.import_state(wanted, data, precondition), wanted)

    path = "/clients/{client_id}/state"
    router.add_api_route(path, export_state, methods=["GET"])
    router.add_api_route(path, import_state, methods=["PUT"], openapi_extra=_DOC)
