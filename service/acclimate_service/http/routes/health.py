"""Probes and metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from acclimate_service.http.routes.desk import Desk, json


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes of orchestrators and monitors."""
    service = desk.service

    async def probe() -> str | None:
        """Why batches cannot be answered now, if so; kept as a metric."""
        reason = await service.obstacle()
        service.telemetry.ready.set(reason is None)
        return reason

    async def live() -> Response:
        """Whether the process answers at all; asks neither Redis nor torch."""
        return json({"live": True})

    async def ready() -> Response:
        """Whether batches are answered; asks Redis."""
        reason = await probe()
        return json({"ready": reason is None, "live": True, "reason": reason}, 200 if reason is None else 503)

    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        await probe()
        service.measure()
        return Response(service.telemetry.render(), media_type="text/plain; version=0.0.4")

    for path, handler in (("/v2/health/live", live), ("/v2/health/ready", ready), ("/metrics", metrics)):
        router.add_api_route(path, handler, methods=["GET"])
