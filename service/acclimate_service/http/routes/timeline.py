"""What became of a client over time: read at once, or told as it happens."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import ClientId, Time, add_route, events_of, json_of
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.clients import Timeline, TimelinePoint
from acclimate_service.state import StateError

LONGEST_RESOLUTION_S: Final = 86_400
_QUIET: Final = 15
"""Looks without news after which a watcher is sent a comment, so that nobody between takes the connection for dead."""
_LARGEST_VERSION: Final = 2**53 - 1


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes of timelines."""

    async def timeline(
        request: Request,
        client_id: ClientId,
        since: Time | None = None,
        resolution: Annotated[float, Query(ge=0, le=LONGEST_RESOLUTION_S)] = 0,
    ) -> Response:
        """What became of a client, the oldest first: the older, the more batches a point is the mean of."""
        context = RequestContext(intake, request, client_id, keyed=False, query=("since", "resolution"))
        with context.admitted():
            begin = 0.0 if since is None else since.timestamp()
            points = await context.service.timelines.of(context.client, begin, resolution)
        bundle = context.service.bundle
        source = bundle.model.source.prior
        prior = None if source is None else [float(f"{share:.6g}") for share in source.tolist()]
        said = {"client_id": client_id, "model": context.service.model, "classes": bundle.manifest.classes}
        return json({**said, "training_prior": prior, "points": points})

    async def watch(request: Request, client_id: ClientId) -> Response:
        """What becomes of a client as it happens, as server-sent events; those after `Last-Event-ID` first."""
        context = RequestContext(intake, request, client_id, keyed=False)
        timelines = context.service.timelines
        happening = timelines.watch(context.client, _last(context), lambda: intake.replica.draining)
        begun = await anext(happening)  # what is wrong is said as of any other request
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(begun, happening), headers=headers, media_type="text/event-stream")

    path = "/clients/{client_id}/timeline"
    add_route(router, "GET", path, timeline, "read_timeline", "clients", json_of(Timeline))
    live, headers = events_of(TimelinePoint), ("Last-Event-ID",)
    add_route(router, "GET", path + "/live", watch, "watch_client", "clients", live, headers=headers)


def _last(context: RequestContext) -> int | None:
    text = context.headers.get("last-event-id")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) > _LARGEST_VERSION:
        raise Problem("invalid_request", f"Last-Event-ID is a version, a whole number up to {_LARGEST_VERSION}")
    return int(text)


async def _events(
    begun: Mapping[str, Any] | None, happening: AsyncGenerator[Mapping[str, Any] | None, None]
) -> AsyncIterator[bytes]:
    assert begun is not None
    yield b"id: %d\nevent: begin\ndata: {}\n\n" % begun["version"]
    quiet = 0
    async with aclosing(happening):
        try:
            async for point in happening:
                quiet = 0 if point else quiet + 1
                if point:
                    yield b"id: %d\nevent: point\ndata: %b\n\n" % (point["version"], orjson.dumps(point))
                elif quiet % _QUIET == 0:
                    yield b":\n\n"
        except StateError:  # whoever asks again is told which
            return
