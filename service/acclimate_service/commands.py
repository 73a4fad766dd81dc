"""What the command `acclimate` does."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from acclimate_adapters import AcclimateError
from acclimate_service.federated.cohort import Round
from acclimate_service.service import open_service
from acclimate_service.serving import serve
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import StateError
from acclimate_service.state.redis.embedded import EmbeddedRedisError, running_at
from acclimate_service.trials.advice import AdviceError, advise, fetch_evidence
from acclimate_store import cli as models


def run(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 0, or 2 with one clear message when it cannot."""
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
    server = commands.add_parser("serve", help="answer batches over HTTP; set by ACCLIMATE_* variables")
    server.set_defaults(run=_run_server)
    one_round = commands.add_parser("round", help="run a federated round among the clients of a running service")
    one_round.set_defaults(run=_run_round)
    advice = commands.add_parser("advise", help="say which adapter the labels told to a running service speak for")
    advice.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    advice.set_defaults(run=_run_advice)
    guard = commands.add_parser("guard", help="what labels made of the answers")
    guard_commands = guard.add_subparsers(dest="guard_command", required=True)
    reset = guard_commands.add_parser("reset", help="let nothing count for the fleet that any client told so far")
    reset.set_defaults(run=_run_reset)
    default_store = Settings.model_fields["model_store"].default
    models.add_parser(commands, Path(os.environ.get("ACCLIMATE_MODEL_STORE") or default_store))
    return parser


def _run_server(_: argparse.Namespace) -> int:
    serve(read_settings())
    return 0


def _run_round(_: argparse.Namespace) -> int:
    settings = read_settings()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = runner.run(_round(settings))
    print(f"acclimate: the cohort is at version {done.version}; {done.clients} clients took part in the round")
    return 0


def _run_reset(_: argparse.Namespace) -> int:
    settings = read_settings()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model = runner.run(_reset(settings))
    print(f"acclimate: the fleet's evidence about {model} starts again; each client's own stays")
    return 0


def _run_advice(options: argparse.Namespace) -> int:
    print(advise(fetch_evidence(options.url)))
    return 0


async def _round(settings: Settings) -> Round:
    async with open_service(_beside(settings)) as service:
        return await service.rounds.run(settings.round_clients)


async def _reset(settings: Settings) -> str:
    async with open_service(_beside(settings)) as service:
        await service.feedback.reset()
        return service.bundle.manifest.key


def _beside(settings: Settings) -> Settings:
    """Of something done beside the service: on the same Redis, which is the service's own if none is named."""
    url = settings.redis_url or running_at(settings.data_dir)
    return settings.model_copy(update={"redis_url": url, "round_interval_s": None})
