"""What the service can do: its models and its adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from acclimate_adapters import ADAPTERS
from acclimate_service.clients.offers import Offer, offers
from acclimate_service.http.routes.desk import Desk, json
from acclimate_store import Bundle


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes of models and adapters. Neither changes while the service runs."""
    service = desk.service
    offered = offers(service.bundle.model)
    model_list = json({"models": [_describe_model(service.bundle, offered)]})
    default = service.configurations.describe(service.configurations.default)
    adapter_list = json(
        {"model": desk.model, "default": default, "adapters": [_describe_adapter(offer) for offer in offered]}
    )

    async def models() -> Response:
        """The model served, its input, its classes, and the adapters it has everything for."""
        return model_list

    async def adapters() -> Response:
        """Every adapter: what it does, its hyper-parameters, and whether the model has everything for it."""
        return adapter_list

    router.add_api_route("/models", models, methods=["GET"])
    router.add_api_route("/adapters", adapters, methods=["GET"])


def _describe_model(bundle: Bundle, offered: tuple[Offer, ...]) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "architecture": manifest.architecture,
        "runtime": bundle.runtime,
        "layout": bundle.layout,
        "classes": list(manifest.classes),
        "input": dict(zip(("channels", "height", "width"), manifest.input.shape, strict=True)),
        "adapters": {offer.name: _availability(offer) for offer in offered if offer.name in ADAPTERS},
        "default": True,
    }


def _describe_adapter(offer: Offer) -> dict[str, Any]:
    return {
        "name": offer.name,
        "description": offer.description,
        "enrols": offer.enrols,
        **_availability(offer),
        "hyperparameters": offer.hyperparameters,
    }


def _availability(offer: Offer) -> dict[str, Any]:
    return {"available": not offer.missing, "missing": list(offer.missing)}
