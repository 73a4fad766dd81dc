"""What a model is: its manifest, its adaptation rates, and the versions of it that the store holds."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import add_route, json_of
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.served import ModelManifest
from acclimate_store import Catalogue


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the route of a model by its name."""
    catalogue = Catalogue(intake.served.settings.model_store)

    def versions() -> list[dict[str, Any]]:
        served, name = intake.served.versions, intake.name
        found = [key.version for key in catalogue.list() if key.name == name] if catalogue.root.is_dir() else []
        return [{"version": each, "served": each in served} for each in found]

    async def of_model() -> Response:
        """Manifest of the model, its adaptation rates, and the versions that the store of the replica holds."""
        service, there = intake.served.default, await asyncio.to_thread(versions)
        source, content = service.bundle.model.source, service.bundle.manifest.model_dump(mode="json")
        rates = None if source.rates is None else {name: float(f"{rate:.6g}") for name, rate in source.rates.items()}
        return json({"model": service.model, "manifest": content, "rates": rates, "versions": there})

    add_route(router, "GET", "/manifest", of_model, "describe_model", "service", json_of(ModelManifest))
