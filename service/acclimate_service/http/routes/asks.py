"""What clients are asked: the rows whose labels would tell something."""

import re
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import CHANGING, ClientId, add_route, json_of
from acclimate_service.http.parameters import check_query
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.labels import Asks, ClientAsks

_MOST: Final = 100
"""Clients on a page."""
_CURSOR: Final = re.compile(r"[0-9]{1,16}(\.[0-9]{1,6})?")
_Cursor = Annotated[str, Query(description="`next` of the page before; the first page without it.")]
_Limit = Annotated[int, Query(json_schema_extra={"minimum": 1, "maximum": _MOST}, description="Clients on a page.")]


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes of open questions."""

    async def of_client(request: Request, client_id: ClientId) -> Response:
        """The client's open questions, the newest first: rows whose labels are asked for, and when each expires."""
        context = RequestContext(intake, request, client_id, keyed=False, query=None)
        with context.admitted():
            found = await context.service.asking.of_client(await context.request(b"asks"))
            return json({"client_id": client_id, "model": context.service.model, **found})

    async def of_all(request: Request, limit: _Limit = _MOST, cursor: _Cursor = "") -> Response:
        """The open questions of all clients of the caller, those first whose questions changed last."""
        check_query(request, ("limit", "cursor"))
        if not 1 <= limit <= _MOST:
            raise Problem("invalid_request", f"limit is {limit}; a page has 1 to {_MOST} clients")
        if cursor and not _CURSOR.fullmatch(cursor):
            raise Problem("invalid_request", f"cursor is {cursor[:40]!r}; it is what the page before says as `next`")
        service = intake.served.default
        page = await service.asking.of_all(request.state.caller.tenant, limit, cursor)
        clients = [
            {
                "client_id": each.client,
                "asks": [question._asdict() for question in each.questions],
                "expires_in_s": each.expires_in_s,
            }
            for each in page.clients
        ]
        return json({"model": service.model, "clients": clients, "next": page.following or None})

    path, reply = "/clients/{client_id}/asks", json_of(ClientAsks)
    add_route(router, "GET", path, of_client, "list_asks_of_client", "labels", reply, headers=CHANGING[1:])
    add_route(router, "GET", "/asks", of_all, "list_asks", "labels", json_of(Asks))
