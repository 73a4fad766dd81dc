"""The HTTP interface: parse, call the service, reply. One module per noun."""

from fastapi import APIRouter

from acclimate_service.http import problems
from acclimate_service.http.context import Intake
from acclimate_service.http.routes import about, clients, feedback, predict

__all__ = ["make_router"]


def make_router(intake: Intake) -> APIRouter:
    """All routes of the service."""
    router = APIRouter(responses=problems.RESPONSES)
    for noun in (predict, clients, feedback, about):
        noun.add_routes(router, intake)
    return router
