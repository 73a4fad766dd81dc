"""The HTTP interface: parse, call the service, reply. One module per noun."""

from fastapi import APIRouter

from acclimate_service.http import problems
from acclimate_service.http.routes import catalogue, clients, feedback, health, predict, states
from acclimate_service.http.routes.desk import Desk
from acclimate_service.service import Service

__all__ = ["make_router"]


def make_router(service: Service) -> APIRouter:
    """All routes of the service."""
    desk = Desk(service)
    router = APIRouter(responses=problems.RESPONSES)
    for noun in (predict, clients, states, feedback, catalogue, health):
        noun.add_routes(router, desk)
    return router
