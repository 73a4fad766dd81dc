"""The HTTP interface: parse, call the engine, reply."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_adapters import ADAPTERS, create, missing
from acclimate_service.engine import Batch, Reply
from acclimate_service.identity import client_id as valid_client_id
from acclimate_service.identity import idempotency_key
from acclimate_service.payload import MEDIA_TYPES, PayloadLimits, decode
from acclimate_service.problems import Problem
from acclimate_service.service import Service
from acclimate_service.settings import Settings
from acclimate_service.state import Attempt, ClientScope, fingerprint, random_rid
from acclimate_store import Bundle

_PREDICT_DOC = {
    "requestBody": {"required": True, "content": {media_type: {} for media_type in MEDIA_TYPES}},
}


def make_router(service: Service) -> APIRouter:
    """All routes of the service."""
    settings, engine, telemetry, bundle = service.settings, service.engine, service.telemetry, service.bundle
    router = APIRouter()
    payload_limits = PayloadLimits(max_images=settings.max_images, max_pixels=settings.max_pixels)
    secret = settings.secret.encode()
    manifest = bundle.manifest
    model = {"name": manifest.name, "version": manifest.version}

    def reply(request: Request, scope: ClientScope, done: Reply) -> Response:
        state = {"version": done.version, "status": done.status, "committed": done.committed, "replayed": done.replayed}
        head = {"client_id": scope.client, "model": model}
        return _json({**head, **done.answer, "state": state, "request_id": request.state.request_id})

    def named(request: Request, client: str, *parts: bytes) -> tuple[ClientScope, str, str]:
        """Client scope, request id and fingerprint of a request that changes a client."""
        scope = ClientScope(valid_client_id(client), settings.tenant)
        key = idempotency_key(request.headers.get("idempotency-key"))
        rid = random_rid() if key is None else scope.rid(key)
        return scope, rid, fingerprint(secret, request.url.path.rpartition("/")[2].encode(), *parts)

    @router.post("/clients/{client_id}/predict", openapi_extra=_PREDICT_DOC)
    async def predict(request: Request, client_id: str, adapt: bool = True, probabilities: bool = False) -> Response:
        """Predict a batch with the client's own model and, unless `adapt=false`, adapt that model to the batch."""
        arrival = time.monotonic()
        valid_client_id(client_id)
        deadline = arrival + _timeout_ms(request, settings) / 1000
        body = await _read(request, settings.max_body_bytes)
        media_type = request.headers.get("content-type", "")
        images = await asyncio.to_thread(decode, body, media_type, request.headers, manifest.input, payload_limits)
        parts = str(images.shape).encode(), images.dtype.str.encode(), b"%d" % probabilities, images.tobytes()
        scope, rid, mark = await asyncio.to_thread(named, request, client_id, *parts)
        batch = Batch(scope, images, rid, mark, deadline, request.is_disconnected, adapt, probabilities)
        return reply(request, scope, await engine.predict(batch))

    @router.get("/clients/{client_id}")
    async def describe(request: Request, client_id: str) -> Response:
        """Version, size and place of a client's state."""
        scope = ClientScope(valid_client_id(client_id), settings.tenant)
        return _json({"client_id": client_id, "model": model, **await service.states.describe(scope)})

    @router.post("/clients/{client_id}/reset")
    async def reset(request: Request, client_id: str) -> Response:
        """Take a client back to the global model."""
        scope, rid, mark = named(request, client_id)
        return reply(request, scope, await engine.reset(scope, Attempt(rid, mark)))

    @router.delete("/clients/{client_id}", status_code=204)
    async def delete(request: Request, client_id: str) -> Response:
        """Remove a client and all that was learned for it."""
        await engine.delete(ClientScope(valid_client_id(client_id), settings.tenant))
        return Response(status_code=204)

    @router.get("/models")
    async def models(request: Request) -> Response:
        """The model served, its input, its classes, and the adapters it has everything for."""
        return _json({"models": [_describe_model(bundle)]})

    @router.get("/v2/health/live")
    async def live() -> Response:
        """Whether the process answers at all; asks neither Redis nor torch."""
        return _json({"live": True})

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        """Whether batches are answered; asks Redis."""
        reason = await service.obstacle()
        telemetry.ready.set(reason is None)
        return _json({"ready": reason is None, "live": True, "reason": reason}, 200 if reason is None else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(telemetry.render(), media_type="text/plain; version=0.0.4")

    return router


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _timeout_ms(request: Request, settings: Settings) -> int:
    text = request.headers.get("x-request-timeout-ms")
    if text is None:
        return settings.request_timeout_ms
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 600_000):
        raise Problem("invalid_request", "X-Request-Timeout-Ms is a whole number of milliseconds from 1 to 600000")
    return min(int(text), settings.request_timeout_ms)


async def _read(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"a request body may have {limit} bytes; send fewer images per batch")


def _describe_model(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    lacking = {name: missing(create(name), bundle.model) for name in sorted(ADAPTERS)}
    return {
        "name": manifest.name,
        "version": manifest.version,
        "architecture": manifest.architecture,
        "classes": list(manifest.classes),
        "input": dict(zip(("channels", "height", "width"), manifest.input.shape, strict=True)),
        "adapters": {name: {"available": not lacks, "missing": list(lacks)} for name, lacks in lacking.items()},
        "default": True,
    }
