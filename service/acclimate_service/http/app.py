"""The ASGI application: routes, problems and middleware around an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from acclimate_service.http import problems
from acclimate_service.http.context import Intake
from acclimate_service.http.middleware import RequestMiddleware, SiteMiddleware, hosts_of
from acclimate_service.http.routes import make_router
from acclimate_service.service import Service


def create_app(service: Service) -> FastAPI:
    """Make the application. Whoever opened the service closes it."""
    intake, settings = Intake(service), service.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with intake.threads:
            yield

    app = FastAPI(
        title="Acclimate",
        version=service.version,
        description="Adapted predictions for every client.",
        redirect_slashes=False,  # a redirected batch would be sent twice
        routes=make_router(intake).routes,
        lifespan=lifespan,
    )
    problems.install(app, [service.bundle.manifest.name, *service.others])
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["ETag", "Retry-After", "X-Request-Id", "X-Caller-Request-Id"],
        )
    hosts = hosts_of(settings.allowed_hosts, settings.host)
    app.add_middleware(SiteMiddleware, hosts=hosts, origins=settings.cors_origins)
    app.add_middleware(RequestMiddleware, replica=service)
    return app
