"""What a model is: its manifest, its adaptation rates, and the versions of it that the store holds."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from acclimate_service.http.context import Intake, json
from acclimate_service.http.openapi import add_route, json_of
from acclimate_service.http.schemas import ModelManifest
from acclimate_store import Catalogue


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the route of a model by its name."""
    service = intake.service
    manifest, source = service.bundle.manifest, service.bundle.model.source
    rates = None if source.rates is None else {name: float(f"{rate:.6g}") for name, rate in source.rates.items()}
    content = manifest.model_dump(mode="json")
    catalogue = Catalogue(service.settings.model_store)

    def versions() -> list[dict[str, Any]]:
        found = (
            [key.version for key in catalogue.list() if key.name == manifest.name] if catalogue.root.is_dir() else []
        )
        return [{"version": each, "served": each == manifest.version} for each in found]

    async def of_model() -> Response:
        """Manifest of the model, its adaptation rates, and the versions that the store of the replica holds."""
        there = await asyncio.to_thread(versions)
        return json({"model": intake.model, "manifest": content, "rates": rates, "versions": there})

    add_route(router, "GET", "/manifest", of_model, "describe_model", "service", json_of(ModelManifest))
