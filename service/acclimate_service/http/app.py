"""The ASGI application: routes, problems and middleware around an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from acclimate_service.http import problems
from acclimate_service.http.access import DecidedRoute, KeyedRoute, KeyMiddleware
from acclimate_service.http.context import Intake
from acclimate_service.http.middleware import RequestMiddleware, SiteMiddleware, hosts_of
from acclimate_service.http.routes import make_router
from acclimate_service.keys import EVERYBODY, STRANGER, Keys, KeysError
from acclimate_service.service import Service
from acclimate_service.settings import Settings, SettingsError


def create_app(service: Service) -> FastAPI:
    """Make the application. Whoever opened the service closes it.

    Raises:
        SettingsError: the file of keys cannot be read.
    """
    intake, settings = Intake(service), service.settings
    keys = _keys(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = keys and asyncio.create_task(keys.follow(service.metrics.background.run))
        with intake.threads:
            yield
        if following:
            following.cancel()

    app = FastAPI(
        title="Acclimate",
        version=service.version,
        description="Adapted predictions for every client.",
        redirect_slashes=False,  # a redirected batch would be sent twice
        routes=make_router(intake, KeyedRoute if keys else DecidedRoute).routes,
        lifespan=lifespan,
    )
    problems.install(app, [service.bundle.manifest.name, *service.others])
    if keys:
        app.add_middleware(KeyMiddleware, keys=keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "ETag",
                "RateLimit",
                "RateLimit-Policy",
                "Retry-After",
                "WWW-Authenticate",
                "X-Request-Id",
                "X-Caller-Request-Id",
            ],
        )
    hosts = hosts_of(settings.allowed_hosts, settings.host)
    app.add_middleware(SiteMiddleware, hosts=hosts, origins=settings.cors_origins)
    caller = STRANGER if keys else EVERYBODY
    app.add_middleware(RequestMiddleware, replica=service, caller=caller, secret=settings.secret)
    return app


def _keys(settings: Settings) -> Keys | None:
    try:
        return Keys(settings.keys_file) if settings.keys_file else None
    except KeysError as error:
        raise SettingsError(f"ACCLIMATE_KEYS_FILE: {error}") from error
