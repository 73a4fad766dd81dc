"""The HTTP interface: parse, call the service, reply. One module per noun."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from acclimate_service.http import openapi, problems
from acclimate_service.http.access import DecidedRoute
from acclimate_service.http.intake import Intake
from acclimate_service.http.routes import (
    about,
    asks,
    bulk,
    clients,
    feedback,
    images,
    inference,
    manifest,
    predict,
    rollouts,
    timeline,
)

__all__ = ["make_router"]


def make_router(intake: Intake, kind: type[DecidedRoute]) -> APIRouter:
    """All routes of the service: those of clients for each model by its name, and for the default one without it."""
    router, replica = APIRouter(responses=problems.RESPONSES, route_class=kind), intake.replica
    others = [Intake(replica, each, intake) for each in replica.models.values() if each is not intake.served]
    for noun in (predict, clients, bulk, timeline, feedback, asks, images):
        noun.add_routes(router, intake)
    for general in (about, inference):
        general.add_routes(router, [intake, *others])
    rollouts.add_routes(router, intake)
    for each in (intake, *others):
        prefix = f"/models/{each.name}"
        of_model = APIRouter(prefix=prefix, responses=problems.RESPONSES, route_class=kind)
        for noun in (predict, clients, bulk, timeline, feedback, asks, images):
            noun.add_routes(of_model, each)
        feedback.add_evidence(of_model, each)
        manifest.add_routes(of_model, each)
        rollouts.add_of_model(of_model, each)
        for route in of_model.routes:
            if isinstance(route, APIRoute):
                route.operation_id = openapi.of_model(route.operation_id or "", each.name)
        router.routes += of_model.routes  # flat: whoever looks which methods a path takes finds them
    return router
