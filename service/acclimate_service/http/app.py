"""The ASGI application: routes, problems and middleware around an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from acclimate_service import ui
from acclimate_service.http import openapi, problems
from acclimate_service.http.access import DecidedRoute, KeyedRoute, KeyMiddleware
from acclimate_service.http.intake import Intake
from acclimate_service.http.middleware import RequestMiddleware, SiteMiddleware, hosts_of
from acclimate_service.http.routes import make_router
from acclimate_service.keys import EVERYBODY, STRANGER, Keys, KeysError
from acclimate_service.replica import Replica
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.tracing import open_tracing


def create_app(replica: Replica) -> FastAPI:
    """Make the application. Whoever opened the replica closes it.

    Raises:
        SettingsError: the file of keys cannot be read.
    """
    settings = replica.settings
    intake = Intake(replica, next(iter(replica.models.values())))
    keys, tracing = _keys(settings), open_tracing(replica.version, settings.replica)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = keys and asyncio.create_task(keys.follow(replica.metrics.background.run))
        with intake.threads:
            yield
        if following:
            following.cancel()
        if tracing:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Acclimate",
        version=replica.version,
        description="Adapted predictions for every client.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirected batch would be sent twice
        routes=make_router(intake, KeyedRoute if keys else DecidedRoute).routes,
        lifespan=lifespan,
    )
    _add_pages(app)
    models = [*replica.models]
    app.openapi = cache(partial(openapi.describe, app, models, settings.root_path))  # type: ignore[method-assign]
    problems.install(app, models)
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
                "Server-Timing",
                "WWW-Authenticate",
                "X-Request-Id",
                "X-Caller-Request-Id",
            ],
        )
    hosts = hosts_of(settings.allowed_hosts, settings.host)
    app.add_middleware(SiteMiddleware, hosts=hosts, origins=settings.cors_origins)
    caller = STRANGER if keys else EVERYBODY
    app.add_middleware(
        RequestMiddleware,
        replica=replica,
        caller=caller,
        secret=settings.secret,
        tracing=tracing,
        root_path=settings.root_path,
    )
    return app


def _keys(settings: Settings) -> Keys | None:
    try:
        return Keys(settings.keys_file) if settings.keys_file else None
    except KeysError as error:
        raise SettingsError(f"ACCLIMATE_KEYS_FILE: {error}") from error


def _add_pages(app: FastAPI) -> None:
    """Show the dashboard at `/ui` and the interface at `/docs`; a browser needs nothing of the internet for either."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )

    async def docs(_: Request) -> Response:
        return page

    app.add_route("/docs", docs, methods=["GET"], include_in_schema=False)

    async def show(_: Request) -> Response:
        return FileResponse(ui.FILES / "index.html")

    app.add_route("/ui", show, methods=["GET"], include_in_schema=False)
    app.mount("/ui", StaticFiles(directory=ui.FILES))
    app.mount("/docs", StaticFiles(directory=Path(fastapi_offline.__file__).with_name("static")))
