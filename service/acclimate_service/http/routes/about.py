"""What the service says of itself: its models, its adapters, its replicas, whether it answers, and its metrics."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_adapters import ADAPTERS
from acclimate_service.compute.adapters import AvailableAdapter, available_adapters
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import Content, add_route, bytes_of, json_of
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.served import Adapters, Live, Models, Ready, Replicas
from acclimate_service.metrics import Metrics
from acclimate_service.service import Service

_OPEN_METRICS = "application/openmetrics-text"
_OF_ALL = "states_of_other_models"
"""What is said of the clients of all tenants together, and to no tenant."""


def add_routes(router: APIRouter, intakes: Sequence[Intake]) -> None:
    """Add the routes of callers, orchestrators and monitors. What is said of a version is made once.

    Args:
        router: that they are added to.
        intakes: of all models, the default one first.
    """
    intake = intakes[0]
    replica, known = intake.replica, WeakKeyDictionary[Service, dict[str, Any]]()

    def described(each: Intake) -> dict[str, Any]:
        service = each.served.default
        if service not in known:
            known[service] = _describe_model(service, default=each is intake)
        return known[service]

    async def models(request: Request) -> Response:
        """The models served, the default one first, their inputs and classes, and the adapters they can serve.

        Of each it is the default version.
        """
        hidden = () if "admin" in request.state.caller.rights else (_OF_ALL,)
        return json({"models": [{k: v for k, v in described(each).items() if k not in hidden} for each in intakes]})

    async def adapters() -> Response:
        """Every adapter: what it does, its hyper-parameters, and whether the model has everything for it."""
        service = intake.served.default
        offered = available_adapters(service.bundle.model, service.settings.adapters, service.configurations.settings)
        default = service.configurations.describe(service.configurations.default)
        return json({"model": service.model, "default": default, "adapters": list(map(_describe_adapter, offered))})

    async def probe() -> str | None:
        """Why batches cannot be answered now, if so; kept as a metric."""
        reason = await replica.obstacle()
        replica.metrics.ready.set(reason is None)
        return reason

    async def live() -> Response:
        """Whether the process answers at all; asks neither Redis nor torch."""
        return json({"live": True})

    async def ready() -> Response:
        """Whether batches are answered; asks Redis. Work beside them that fails is listed, and is no reason."""
        reason = await probe()
        said = {"ready": reason is None, "live": True, "reason": reason, "failing": _failing(replica.metrics)}
        reply = json(said, 200 if reason is None else 503)
        if reason is not None:
            reply.headers["Retry-After"] = "1"
        return reply

    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format, or as OpenMetrics where that is accepted."""
        await probe()
        replica.measure()
        body, media_type = replica.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    async def replicas() -> Response:
        """The replicas and what each last said of itself, whichever of them is asked; and their Redis."""
        there, facts = await asyncio.gather(replica.shared.presence.all(), replica.facts())
        said = [
            {**each.said, "name": each.name.partition("~")[0], "id": each.name, "age_s": each.age_s} for each in there
        ]
        store = {**asdict(facts), "version": ".".join(map(str, facts.version))}
        return json({"answered_by": replica.shared.name, "replicas": said, "redis": store})

    def add(path: str, name: str, handler: Callable[..., Any], reply: Content, **more: Any) -> None:
        add_route(router, "GET", path, handler, name, "service", reply, **more)

    add("/models", "list_models", models, json_of(Models))
    add("/adapters", "list_adapters", adapters, json_of(Adapters))
    add("/v2/health/live", "is_live", live, json_of(Live))
    add("/v2/health/ready", "is_ready", ready, json_of(Ready), unavailable=json_of(Ready))
    add("/replicas", "list_replicas", replicas, json_of(Replicas))
    add("/metrics", "read_metrics", metrics, {**bytes_of("text/plain"), **bytes_of(_OPEN_METRICS)})


def _failing(metrics: Metrics) -> list[dict[str, Any]]:
    """Work that nobody waits for and whose last run failed; its error's words are in the log alone."""
    now = time.monotonic()
    return [
        {"task": task, "seconds": round(now - failing.since, 1), "error": type(failing.error).__name__}
        for task, failing in metrics.background.failing.items()
    ]


def _describe_model(service: Service, *, default: bool) -> dict[str, Any]:
    bundle, manifest = service.bundle, service.bundle.manifest
    offered, earned = (
        available_adapters(bundle.model, service.settings.adapters),
        bundle.default(service.settings.adapters),
    )
    return {
        "name": manifest.name,
        "version": manifest.version,
        "architecture": manifest.architecture,
        "runtime": bundle.runtime,
        "layout": bundle.layout,
        "classes": list(manifest.classes),
        "input": dict(zip(("channels", "height", "width"), manifest.input.shape, strict=True)),
        "adapters": {offer.name: _availability(offer) for offer in offered if offer.name in ADAPTERS},
        "default_adapter": {"name": earned.adapter, "because": earned.because, "reason": earned.reason},
        "default": default,
        _OF_ALL: {"clients": dict(service.elsewhere), "complete": service.counted},
    }


def _describe_adapter(offer: AvailableAdapter) -> dict[str, Any]:
    return {
        "name": offer.name,
        "description": offer.description,
        "enrols": offer.enrols,
        **_availability(offer),
        "hyperparameters": offer.hyperparameters,
    }


def _availability(offer: AvailableAdapter) -> dict[str, Any]:
    return {"available": not offer.missing, "missing": list(offer.missing)}
