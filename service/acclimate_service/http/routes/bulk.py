"""Many clients at once: take the states of a page of them out, or remove them."""

import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from acclimate_service.clients.roster import Page
from acclimate_service.clients.roster import Wanted as WantedClients
from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext, at_once
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import LINES, Time, add_route, json_of
from acclimate_service.http.problems import failure_of
from acclimate_service.http.replies import json, pieces_of
from acclimate_service.http.routes.clients import FILTERS, LARGEST_PAGE, PAGE, SMALLEST_PAGE, page_of
from acclimate_service.http.schemas.clients import DeletedClients, ExportedPage, ExportedState, FailedClient
from acclimate_service.http.schemas.common import Verdict

_COPIES = 3
"""Of a state that a line of it takes: its bytes, and the text of them, which is a third longer."""
Limit = Annotated[int, Query(ge=SMALLEST_PAGE, le=LARGEST_PAGE)]
Cursor = Annotated[str, Query(max_length=64)]
AdapterName = Annotated[str | None, Query(max_length=64)]
All = Annotated[bool, Query(description="That every client is meant, where nothing else says which.")]


class BulkRoutes:
    """The handlers for many clients of one model.

    Args:
        intake: of the model.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def export(
        self,
        request: Request,
        limit: Limit = PAGE,
        cursor: Cursor = "",
        adapter: AdapterName = None,
        active_since: Time | None = None,
        verdict: Verdict | None = None,
    ) -> Response:
        """States of a page of clients, a line for each as it is read; the last line leads on, and says how many."""
        context = RequestContext(self._intake, request, None, keyed=False, query=("limit", "cursor", *FILTERS))
        wanted = WantedClients.of(adapter, active_since, verdict)
        with ExitStack() as held:
            held.enter_context(context.admitted())
            page = await page_of(context, wanted, limit, cursor)
            return _Lines(self._lines(context, request, page), held.pop_all())

    async def delete(
        self,
        request: Request,
        limit: Limit = PAGE,
        cursor: Cursor = "",
        adapter: AdapterName = None,
        active_since: Time | None = None,
        verdict: Verdict | None = None,
        all: All = False,
    ) -> Response:
        """Remove a page of clients and all that was learned for them; those that stay are named, and why."""
        context = RequestContext(self._intake, request, None, keyed=False, query=("limit", "cursor", "all", *FILTERS))
        wanted = WantedClients.of(adapter, active_since, verdict)
        if not all and wanted == WantedClients():
            detail = f"nothing says which clients are meant; give {', '.join(FILTERS)}, or all=true for every one"
            raise Problem("invalid_request", detail)
        deleted, failed = list[str](), list[Mapping[str, Any]]()
        with context.admitted():
            page = await page_of(context, wanted, limit, cursor)
            for name in (row["client_id"] for row in page.clients):
                try:
                    await context.service.clients.delete(await context.request_of(name, b"delete"))
                except Exception as error:
                    failed.append({"client_id": name, **failure_of(request, error)})
                else:
                    deleted.append(name)
        return json({"model": context.service.model, "deleted": deleted, "failed": failed, "next": page.cursor})

    async def _lines(self, context: RequestContext, request: Request, page: Page) -> AsyncGenerator[memoryview, None]:
        """The bytes of the reply: as much at a time as a caller takes, and one state at a time in memory."""
        longest_s, done = context.service.settings.request_timeout_ms / 1000, 0
        for name in (row["client_id"] for row in page.clients):
            try:
                asked = replace(await context.request_of(name, b"export"), deadline=time.monotonic() + longest_s)
                exported = await context.service.clients.export_state(asked)
                with context.holding(_COPIES * len(exported.data)):
                    described = context.service.configurations.describe(exported.configuration)
                    known = {"client_id": name, **described, "version": exported.version}
                    line = await at_once(partial(_line, known, exported.data), len(exported.data))
                    done += 1
                    for piece in pieces_of(line):
                        yield piece
            except Exception as error:
                yield memoryview(orjson.dumps({"client_id": name, **failure_of(request, error)}) + b"\n")
        end = {"exported": done, "failed": len(page.clients) - done, "next": page.cursor}
        yield memoryview(orjson.dumps(end) + b"\n")


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes for many clients."""
    handlers, headers = BulkRoutes(intake), ("X-Request-Timeout-Ms",)
    lines = json_of(ExportedState, FailedClient, ExportedPage, media_type=LINES)
    add_route(router, "GET", "/states", handlers.export, "export_states", "clients", lines)
    reply = json_of(DeletedClients)
    add_route(router, "DELETE", "/clients", handlers.delete, "delete_clients", "clients", reply, headers=headers)


class _Lines(StreamingResponse):
    """Lines of JSON; what the request holds is counted until the last of them."""

    def __init__(self, lines: AsyncGenerator[memoryview, None], held: ExitStack) -> None:
        super().__init__(lines, media_type=LINES)
        self._written = lines
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            async with aclosing(self._written):
                await super().__call__(scope, receive, send)


def _line(known: Mapping[str, Any], state: bytes) -> bytes:
    return orjson.dumps({**known, "state": b64encode(state).decode("ascii")}) + b"\n"
