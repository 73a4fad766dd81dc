"""What the commands of `acclimate` do that need the service."""

import argparse
import asyncio
from typing import Final

from acclimate_adapters import AcclimateError
from acclimate_service.federated.cohort import Round
from acclimate_service.logs import set_up
from acclimate_service.remote import Remote, RemoteError
from acclimate_service.replica import open_replica
from acclimate_service.serving import new_event_loop, serve
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import EmbeddedRedisError, StateError, running_at
from acclimate_service.trials.advice import advise, fetch_evidence

ERRORS: Final = (SettingsError, AcclimateError, StateError, EmbeddedRedisError, RemoteError)
"""What ends a command with its message alone."""


def run_server(options: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    prefix, given = "setting_", vars(options).items()
    settings = read_settings(
        **{name.removeprefix(prefix): value for name, value in given if name.startswith(prefix) and value}
    )
    set_up(settings.log_format, settings.log_level)
    serve(settings)
    return 0


def run_round(_: argparse.Namespace) -> int:
    """Run a federated round and say what became of it."""
    settings = read_settings()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        done = runner.run(_round(settings))
    print(f"acclimate: the cohort is at version {done.version}; {done.clients} clients took part in the round")
    return 0


def run_reset(_: argparse.Namespace) -> int:
    """Begin the fleet's evidence again."""
    settings = read_settings()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        model = runner.run(_reset(settings))
    print(f"acclimate: the fleet's evidence about {model} starts again; each client's own stays")
    return 0


def run_advice(options: argparse.Namespace) -> int:
    """Print what the labels speak for."""
    print(advise(fetch_evidence(Remote.of(options.url, options.key_file))))
    return 0


async def _round(settings: Settings) -> Round:
    async with open_replica(_beside(settings)) as replica:
        return await replica.service.rounds.run(settings.round_clients)


async def _reset(settings: Settings) -> str:
    async with open_replica(_beside(settings)) as replica:
        await replica.service.feedback.reset()
        return replica.service.bundle.manifest.key


def _beside(settings: Settings) -> Settings:
    """Of something done beside the service: on the same Redis, which is the service's own if none is named."""
    url = settings.redis_url or running_at(settings.data_dir)
    return settings.model_copy(update={"redis_url": url, "round_interval_s": None})
