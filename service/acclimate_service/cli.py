"""The command `acclimate`."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvicorn

from acclimate_adapters import AcclimateError
from acclimate_service.app import create_app
from acclimate_service.embedded import EmbeddedRedisError
from acclimate_service.service import Service, open_service
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import StateError
from acclimate_store import cli as models

KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections, so that they never send into one that is just being closed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 with one clear message when it cannot."""
    parser = argparse.ArgumentParser(prog="acclimate", description="Adapted predictions for every client.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="answer batches over HTTP; set by ACCLIMATE_* variables")
    serve.set_defaults(run=lambda options: asyncio.run(_serve(read_settings())))
    models.add_parser(
        commands, Path(os.environ.get("ACCLIMATE_MODEL_STORE", Settings.model_fields["model_store"].default))
    )
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (SettingsError, AcclimateError, StateError, EmbeddedRedisError, ValueError) as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 2


async def _serve(settings: Settings) -> None:
    stop_quietly()
    async with open_service(settings) as service:
        config = uvicorn.Config(
            create_app(service),
            host=settings.host,
            port=settings.port,
            timeout_keep_alive=KEEP_ALIVE_S,
            log_level="warning",
        )
        server = uvicorn.Server(config)
        announcement = asyncio.create_task(_announce(server, service))
        await server.serve()
        await announcement


def stop_quietly() -> None:
    """Let uvicorn end on SIGTERM and SIGINT by its own handlers, and nothing more happen when it raises them again."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


async def _announce(server: uvicorn.Server, service: Service) -> None:
    while not server.started:
        if server.should_exit:
            return
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    where = "the Redis at ACCLIMATE_REDIS_URL" if service.settings.redis_url else f"{service.settings.data_dir}"
    print(
        f"acclimate: serving {service.bundle.manifest.key} at http://{host}:{port}, "
        f"state in {where} (durability {service.store_facts.durability})",
        flush=True,
    )
