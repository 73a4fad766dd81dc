"""The HTTP interface: parse, call the service, reply. One module per noun."""

from fastapi import APIRouter

from acclimate_service.http import problems
from acclimate_service.http.routes import about, clients, feedback, predict
from acclimate_service.service import Service

__all__ = ["make_router"]


def make_router(service: Service) -> APIRouter:
    """All routes of the service."""
    router = APIRouter(responses=problems.RESPONSES)
    for noun in (predict, clients, feedback, about):
        noun.add_routes(router, service)
    return router
