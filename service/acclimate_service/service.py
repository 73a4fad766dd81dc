"""Everything the HTTP interface stands on, opened and closed together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from acclimate_adapters import FrozenModel, create, missing, require
from acclimate_service.cache import StateCache
from acclimate_service.configuration import Configurations
from acclimate_service.embedded import EmbeddedRedis
from acclimate_service.engine import Engine
from acclimate_service.settings import Settings
from acclimate_service.state import Limits, StateError, StateStore, StoreFacts, Wire, check, check_windows, connect
from acclimate_service.states import ClientStates
from acclimate_service.telemetry import Telemetry
from acclimate_service.worker import Worker
from acclimate_store import Bundle, BundleKey, Catalogue

RETRY_WINDOW_MS = 600_000
"""Longest time within which callers are expected to retry a request."""


@dataclass(frozen=True, slots=True)
class Service:
    """An open service."""

    settings: Settings
    bundle: Bundle
    states: ClientStates
    engine: Engine
    telemetry: Telemetry
    store_facts: StoreFacts
    wire: Wire

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return version("acclimate")

    async def obstacle(self) -> str | None:
        """Why batches cannot be answered now; None when they can."""
        try:
            await self.wire.read("PING")
        except StateError as error:
            return str(error)
        return None


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[Service]:
    """Load the model, reach Redis (or start a private one), and answer a first batch.

    Raises:
        BundleError: the model cannot be served.
        ConfigurationError: the adapter is unknown, wrongly set, or lacks something the bundle does not carry.
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        ValueError: the lifetimes of the settings contradict each other.
    """
    bundle = Catalogue(settings.model_store, settings.allowed_imports).load(
        *BundleKey.parse(settings.model), settings.device
    )
    configurations = Configurations(settings.adapter or default_adapter(bundle.model), settings.adapter_options)
    require(configurations.adapter(configurations.default), bundle.model)
    limits = Limits(inline_max=settings.inline_max, state_ttl_ms=settings.state_ttl_s * 1000)
    check_windows(limits, longest_request_ms=settings.request_timeout_ms, retry_window_ms=RETRY_WINDOW_MS)
    telemetry = Telemetry()
    async with AsyncExitStack() as stack:
        url = settings.redis_url or (await stack.enter_async_context(EmbeddedRedis(settings.data_dir))).url
        wire = Wire(connect(url), resend=limits.resend, jitter_ms=limits.jitter_ms)
        store = StateStore(wire, limits)
        stack.push_async_callback(store.aclose)
        facts = await check(wire, override=settings.redis_override)
        worker = Worker(settings.threads)
        stack.callback(worker.close)
        cache = StateCache(settings.cache_bytes)
        states = ClientStates(bundle.model, configurations, store, limits, cache, telemetry)
        engine = Engine(bundle, configurations, states, worker, telemetry, max_waiting=settings.max_waiting)
        await engine.warm_up(np.zeros((2, *bundle.manifest.input.shape), np.uint8))
        yield Service(settings, bundle, states, engine, telemetry, facts, wire)


def default_adapter(model: FrozenModel) -> str:
    """`atp` for a model with learned rates, which encode the shifts of the source clients; else `none`."""
    return "none" if missing(create("atp"), model) else "atp"
