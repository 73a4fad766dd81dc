"""What the services of all models stand on: Redis, the thread that runs torch, and the bounds that they share."""

import asyncio
import logging
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Final, NamedTuple

import torch

from acclimate_service.clients.admission import Admission
from acclimate_service.clients.webhook import Webhook
from acclimate_service.compute.process import available_cores, background, pool
from acclimate_service.compute.worker import Worker
from acclimate_service.metrics import Metrics
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import (
    Census,
    EmbeddedRedis,
    Limits,
    Link,
    Presence,
    Probe,
    Rates,
    StateError,
    StateStore,
    Wire,
    check,
    check_windows,
    connect,
    new_id,
    take_census,
)

_LAST_STEP_S: Final = 1.0
"""Longest wait at the end for a step that nobody waits for any more."""
_LONGEST_CENSUS_S: Final = 1.0
"""Of walking over all keys at the start; a second is enough for a million."""
_log = logging.getLogger(__name__)
RETRY_WINDOW_MS: Final = 600_000
"""Longest time within which callers are expected to retry a request."""


class Redis(NamedTuple):
    """Where the states are kept; `private` if nobody else's."""

    private: EmbeddedRedis | None
    link: Link
    wire: Wire
    store: StateStore
    probe: Probe


class Shared(NamedTuple):
    """What the services of all models have in common; `tenant` is that of the default model.

    `census` is of the clients that had a state at the start; `name` is that of the replica, different after each start.
    """

    limits: Limits
    metrics: Metrics
    worker: Worker
    low_priority: Executor
    redis: Redis
    census: Census
    admission: Admission
    rates: Rates | None
    tenant: str
    webhook: Webhook | None
    presence: Presence
    name: str


async def open_shared(settings: Settings, stack: AsyncExitStack) -> Shared:
    """Reach Redis (or start a private one), and start the thread that runs torch; the stack closes both.

    Raises:
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        SettingsError: a setting that this machine cannot serve, or one that contradicts another.
    """
    limits, metrics = _limits(settings), Metrics()
    metrics.runs(version=version("acclimate"), torch=torch.__version__, device=settings.device)
    asyncio.get_running_loop().set_default_executor(pool())
    threads = settings.threads or min(torch.get_num_threads(), available_cores())
    worker = Worker(threads, overtaking=settings.device == "cpu")
    stack.callback(_close_worker, worker)
    low_priority = stack.enter_context(background())
    redis = await _open_redis(settings, limits, metrics, stack)
    admission = Admission(settings.max_waiting, settings.max_waiting_rows, settings.max_queue_ms / 1000)
    census = await _census(redis.wire)
    quota, tenant = settings.tenant_rows_per_minute, settings.tenant
    rates = None if quota is None else Rates(redis.wire, tenant, quota)
    webhook = None
    if settings.webhook_url is not None:
        webhook = Webhook(settings.webhook_url, settings.secret, metrics.background)
        stack.push_async_callback(webhook.aclose)
    return Shared(
        limits=limits,
        metrics=metrics,
        worker=worker,
        low_priority=low_priority,
        redis=redis,
        census=census,
        admission=admission,
        rates=rates,
        tenant=tenant,
        webhook=webhook,
        presence=Presence(redis.wire, tenant),
        name=f"{settings.replica}~{new_id()}",
    )


def _close_worker(worker: Worker) -> None:
    """Stop the thread of torch. One that does not come back is left alone: nobody waits for it any more."""
    if not worker.close(_LAST_STEP_S):
        _log.error("the device is still at one piece of work after %.0f s; it is given up", worker.busy_s)


async def _open_redis(settings: Settings, limits: Limits, metrics: Metrics, stack: AsyncExitStack) -> Redis:
    """Reach Redis, or start a private one; raises as `open_shared`."""
    url, private = settings.redis_url, None
    if url is None:
        private = await stack.enter_async_context(_private_redis(settings))
        url = private.url
    link = await connected(url)
    wire = Wire(
        link,
        resend=limits.resend,
        jitter_ms=limits.jitter_ms,
        replicas=settings.replicas_to_wait,
        observe=metrics.redis_seconds.observe,
    )
    store = StateStore(wire, limits)
    stack.push_async_callback(store.aclose)
    facts = await check(wire, override=settings.redis_override)
    probe = Probe(wire, facts, metrics.background, tenant=settings.tenant, override=settings.redis_override)
    stack.push_async_callback(probe.aclose)
    return Redis(private, link, wire, store, probe)


async def _census(wire: Wire) -> Census:
    """The clients that have a state; a Redis that does not let them be counted can serve them all the same."""
    try:
        return await take_census(wire, _LONGEST_CENSUS_S)
    except StateError as error:
        _log.warning("states of other models are not counted: %s", error)
        return Census({}, complete=False)


def _limits(settings: Settings) -> Limits:
    """Of the state protocol; raises SettingsError where they contradict each other."""
    limits = Limits(inline_max=settings.inline_max, state_ttl_ms=settings.state_ttl_s * 1000)
    try:
        check_windows(limits, longest_request_ms=settings.request_timeout_ms, retry_window_ms=RETRY_WINDOW_MS)
    except ValueError as error:
        raise SettingsError(f"ACCLIMATE_STATE_TTL_S, ACCLIMATE_REQUEST_TIMEOUT_MS: {error}") from error
    return limits


def _private_redis(settings: Settings) -> EmbeddedRedis:
    return EmbeddedRedis(settings.data_dir, appendfsync=settings.appendfsync, max_bytes=settings.redis_max_bytes)


async def connected(url: str) -> Link:
    """A way to the Redis at this URL; raises SettingsError if it is none."""
    try:
        return await connect(url)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"ACCLIMATE_REDIS_URL: {error}") from error
