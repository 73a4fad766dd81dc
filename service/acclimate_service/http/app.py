"""The ASGI application: routes, problems and middleware around an engine."""

from fastapi import FastAPI

from acclimate_service.http import problems
from acclimate_service.http.middleware import RequestMiddleware
from acclimate_service.http.routes import make_router
from acclimate_service.service import Service


def create_app(service: Service) -> FastAPI:
    """Make the application. Whoever opened the service closes it."""
    app = FastAPI(
        title="Acclimate",
        version=service.version,
        description="Adapted predictions for every client.",
        redirect_slashes=False,  # a redirected batch would be sent twice
        routes=make_router(service).routes,
    )
    problems.install(app)
    app.add_middleware(RequestMiddleware, metrics=service.metrics, draining=lambda: service.draining)
    return app
