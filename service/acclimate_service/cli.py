"""The command `acclimate`."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from acclimate_adapters import AcclimateError
from acclimate_service.advice import AdviceError, advise, fetch_evidence
from acclimate_service.app import create_app
from acclimate_service.bench import cli as bench
from acclimate_service.cohort import Round
from acclimate_service.embedded import EmbeddedRedisError, running_at
from acclimate_service.memory import keep_freed_memory
from acclimate_service.offers import summary
from acclimate_service.protocol import WholeReplies
from acclimate_service.server import DrainingServer
from acclimate_service.service import Service, open_service
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import StateError
from acclimate_store import cli as models

KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections, so that they never send into one that is just being closed."""
GRACE_S = 30
"""Longest wait at the end for batches under way."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 with one clear message when it cannot."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return int(options.run(options))
    except (SettingsError, AcclimateError, StateError, EmbeddedRedisError, AdviceError) as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="acclimate", description="Adapted predictions for every client.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="answer batches over HTTP; set by ACCLIMATE_* variables")
    serve.set_defaults(run=_run_server)
    one_round = commands.add_parser("round", help="run a federated round among the clients of a running service")
    one_round.set_defaults(run=_run_round)
    advice = commands.add_parser("advise", help="say which adapter the labels told to a running service speak for")
    advice.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    advice.set_defaults(run=_run_advice)
    default_store = Settings.model_fields["model_store"].default
    models.add_parser(commands, Path(os.environ.get("ACCLIMATE_MODEL_STORE") or default_store))
    bench.add_parser(commands)
    return parser


def _run_server(_: argparse.Namespace) -> int:
    settings = read_settings()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))
    return 0


def _run_round(_: argparse.Namespace) -> int:
    settings = read_settings()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = runner.run(_round(settings))
    print(f"acclimate: the cohort is at version {done.version}; {done.clients} clients took part in the round")
    return 0


def _run_advice(options: argparse.Namespace) -> int:
    print(advise(fetch_evidence(options.url)))
    return 0


async def _round(settings: Settings) -> Round:
    """A round beside the service: on the same Redis, which is the service's own if none is named."""
    url = settings.redis_url or running_at(settings.data_dir)
    async with open_service(settings.model_copy(update={"redis_url": url, "round_interval_s": None})) as service:
        return await service.rounds.run(settings.round_clients)


async def _serve(settings: Settings) -> None:
    with _bind(settings.host, settings.port) as listener:
        async with open_service(settings) as service:
            config = uvicorn.Config(
                create_app(service),
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                log_level="warning",
                http=WholeReplies,
                ws="none",
            )
            gc.freeze()  # what was loaded stays: no collection need walk over it and hold up the requests
            server = DrainingServer(config, service, settings.lead_s)
            server.heed_signals()
            listener.listen(BACKLOG)
            offered = f"acclimate: {summary(service.bundle.model)}"
            print(_announcement(service, listener), offered, _computing(service), sep="\n", flush=True)
            await server.serve(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is done; nobody is let in until the service can answer.

    Raises:
        SettingsError: the address is not ours, or the port is taken.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or error
        raise SettingsError(f"ACCLIMATE_HOST, ACCLIMATE_PORT: cannot listen at {host}:{port}: {reason}") from error
    return listener


def _announcement(service: Service, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    where = "the Redis at ACCLIMATE_REDIS_URL" if service.settings.redis_url else f"{service.settings.data_dir}"
    return (
        f"acclimate: serving {service.bundle.manifest.key} at http://{f'[{host}]' if ':' in host else host}:{port}, "
        f"state in {where} (durability {service.store_facts.durability})"
    )


def _computing(service: Service) -> str:
    bundle = service.bundle
    return (
        f"acclimate: {bundle.runtime} on {bundle.model.device.type} computes what needs no gradient; "
        f"memory layout of torch's passes: {bundle.layout}"
    )
