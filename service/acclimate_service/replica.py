"""A replica: all models that it serves, what they stand on, and how it follows the rollouts that are noted in Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import metadata
from typing import Any, Final

from acclimate_service.clients.requests import rfc3339
from acclimate_service.errors import Problem
from acclimate_service.metrics import Metrics
from acclimate_service.models import named, settings_by_model
from acclimate_service.opening import Shared, open_shared
from acclimate_service.replicas import Speaker, Stages
from acclimate_service.rollout import LOOK_S, Assignment, Rollout, Rollouts, Seen
from acclimate_service.served import Served
from acclimate_service.service import Service
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import StateError, StoreFacts, Tasks, inspect
from acclimate_store import BundleNotFound, Catalogue

_TRIES: Final = 8


class Replica:
    """What answers all requests of a process.

    Attributes:
        settings: of it.
        shared: what the services of all models stand on.
        metrics: of the process.
        models: that are served, the default one first, by name.
        rollouts: as they are noted in Redis.
        draining: it is to end: it still answers, and says that it is not ready.
    """

    def __init__(self, settings: Settings, shared: Shared) -> None:
        self.settings = settings
        self.shared = shared
        self.metrics: Metrics = shared.metrics
        self.models: dict[str, Served] = {}
        self.rollouts = Rollouts(shared.redis.wire, settings.tenant, shared.name)
        self.draining = False
        self._started = time.time()
        self._tasks = Tasks(shared.metrics.background)

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return metadata.version("acclimate")

    @property
    def service(self) -> Service:
        """That of the default version of the default model."""
        return next(iter(self.models.values())).default

    async def obstacle(self) -> str | None:
        """Why batches cannot be answered now, or not for long; None when they can."""
        if self.draining:
            return "the replica is about to end; send batches to another one"
        longest, worker, redis = self.settings.request_timeout_ms / 1000, self.shared.worker, self.shared.redis
        if worker.busy_s > longest:
            return f"{self.settings.device} has been at one piece of work for more than {longest:g} s"
        if redis.private is not None and redis.private.failure is not None:
            return redis.private.failure
        lacking = next(filter(None, (each.obstacle for each in self.models.values())), None)
        return lacking or await redis.probe.obstacle()

    async def about(self, stages: Stages) -> dict[str, Any]:
        """What the replica says of itself to the others."""
        every = [service for each in self.models.values() for service in each.versions.values()]
        reason = await self.obstacle()
        journals = [each.sessions.journals() for each in every]
        return {
            "version": self.version,
            "started_at": rfc3339(self._started),
            "device": self.settings.device,
            "models": [each.bundle.manifest.key for each in every],
            "ready": reason is None,
            "reason": reason,
            "failing": list(self.metrics.background.failing),
            "waiting": self.shared.admission.batches.taken,
            "clients_in_memory": sum(len(each.sessions) for each in every),
            "state_bytes": sum(each.sessions.nbytes for each in every),
            "leases": sum(each.sessions.leases for each in every),
            "journal_entries": sum(entries for entries, _ in journals),
            "journal_bytes": sum(nbytes for _, nbytes in journals),
            "stages": stages.look(),
        }

    async def facts(self) -> StoreFacts:
        """What its Redis says of itself now; raises StateError where it is away."""
        return await inspect(self.shared.redis.wire)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        services = [(each, service) for each in self.models.values() for service in each.versions.values()]
        every = [service.sessions for _, service in services]
        metrics, journals = self.metrics.state, [each.journals() for each in every]
        self.metrics.waiting.set(self.shared.admission.batches.taken)
        metrics.sessions.set(sum(map(len, every)))
        metrics.cache_bytes.set(sum(each.nbytes for each in every))
        metrics.journal_entries.set(sum(entries for entries, _ in journals))
        metrics.journal_bytes.set(sum(nbytes for _, nbytes in journals))
        metrics.unreplicated(self.shared.redis.wire.unreplicated)
        self.metrics.version_share.clear()
        for served, service in services:
            name, number = service.model["name"], service.model["version"]
            self.metrics.version_share.labels(name, number).set(served.applied.share_of(number))

    async def open(self, stack: AsyncExitStack) -> None:
        """Load all models, in the versions that are noted in Redis, or else in those that the settings name."""
        wanted = settings_by_model(self.settings)
        catalogue = Catalogue(self.settings.model_store, self.settings.allowed_imports)
        keys = [catalogue.resolve(*named(each.model, catalogue)) for each in wanted]
        for settings, key in zip(wanted, keys, strict=True):
            assert key.version is not None
            base = Rollout(key.version, (key.version,))
            self.models[key.name] = Served(key.name, settings, self.shared, base, stack)
        seen = await self.rollouts.look(self._report())  # from now on this replica is waited for
        stack.push_async_callback(self._leave)
        for served in self.models.values():
            noted = seen.rollouts.get(served.name)
            served.wanted = noted or served.wanted
            try:
                await served.open()
            except BundleNotFound as error:
                if noted is None:
                    raise
                raise SettingsError(
                    f"{error}; a rollout that is noted in Redis names it: put it back into the store, or have the "
                    f"rollout forgotten: HDEL {self.rollouts.key} {served.name}"
                ) from error
        await self._look()
        self._tasks.start("rollouts", self._follow())

    async def load(self, model: str, version: str | None) -> str:
        """Load a version here, and have all replicas load it; it answers nobody yet.

        Args:
            model: name.
            version: None for the newest of the store.

        Returns:
            Which version it is.

        Raises:
            Problem: `not_found`; `version_unfit` with the reason why it must not be served.
            StateError: Redis failed.
        """
        served = self._of(model)
        catalogue = Catalogue(self.settings.model_store, self.settings.allowed_imports)
        try:
            key = await asyncio.to_thread(catalogue.resolve, model, version)
        except BundleNotFound as error:
            raise Problem("not_found", str(error)) from error
        assert key.version is not None
        try:
            await served.load(key.version)
        except StateError:
            raise
        except Exception as error:  # whatever the code of a network raises, or a device that is full
            raise Problem("version_unfit", f"{key} is not loaded: {error}") from error
        loaded = key.version
        await self._note(served, lambda now, _: now.with_loaded(loaded))
        return loaded

    async def unload(self, model: str, version: str | None, *, force: bool = False) -> tuple[str, ...]:
        """Have all replicas let go of a version, each once its last requests are answered.

        Args:
            model: name.
            version: None for all that answer nobody.
            force: also a canary, whose clients are the default's from then on.

        Returns:
            Which versions these are.

        Raises:
            Problem: `not_found`; `version_in_use`, with the share of the clients that it answers.
            StateError: Redis failed.
        """
        served, gone = self._of(model), tuple[str, ...]()

        def without(now: Rollout, _: Seen) -> Rollout:
            nonlocal gone
            gone = tuple(each for each in now.loaded if each not in now.needed) if version is None else (version,)
            if not gone:
                raise Problem("version_in_use", f"every version of {model} that is loaded answers clients")
            for each in gone:
                _require_loaded(now, model, each)
                _require_idle(now, model, each, force)
                now = now.without(each)
            return now

        await self._note(served, without)
        return gone

    async def answer_by(self, model: str, wanted: Assignment) -> None:
        """Have clients answered by other versions: a share of them by the canary, all others by the default.

        Raises:
            Problem: `not_found`; `version_not_loaded` where a replica lacks one of them.
            StateError: Redis failed.
        """
        served = self._of(model)

        def change(now: Rollout, seen: Seen) -> Rollout:
            for version in (wanted.default, *filter(None, (wanted.canary, wanted.shadow))):
                _require_loaded(now, model, version)
                seen.require_everywhere(model, version)
            return now.assigned(wanted)

        await self._note(served, change)

    async def seen(self) -> Seen:
        """What is noted now, and what all replicas have; raises StateError."""
        return await self.rollouts.look(self._report())

    async def _note(self, served: Served, change: Callable[[Rollout, Seen], Rollout]) -> None:
        for _ in range(_TRIES):
            seen = await self.seen()
            before = seen.rollouts.get(served.name)
            after = change(before or served.applied, seen)
            if await self.rollouts.change(served.name, before, after):
                await served.follow(after)
                await self.seen()  # others hear at once what this replica has
                return
        raise Problem("conflict", f"the rollout of {served.name} is being changed by others; look at it and try again")

    def _of(self, model: str) -> Served:
        try:
            return self.models[model]
        except KeyError:
            known = ", ".join(self.models)
            raise Problem("not_found", f"there is no model {model[:64]!r}; served are {known}") from None

    def _report(self) -> Mapping[str, Any]:
        return {name: each.report for name, each in self.models.items()}

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.metrics.background.run("rollouts", self._look)

    async def _look(self) -> None:
        seen = await self.seen()
        for name, noted in seen.rollouts.items():
            served = self.models.get(name)
            if served is not None and noted.number > served.wanted.number:
                self._tasks.start("rollout", served.follow(noted))

    async def _leave(self) -> None:
        await self._tasks.aclose()
        with suppress(StateError):  # else the others wait for it a little longer
            await self.rollouts.leave()


def _require_loaded(now: Rollout, model: str, version: str) -> None:
    if version not in now.loaded:
        known = ", ".join(now.loaded)
        raise Problem("not_found", f"{model}/{version} is not loaded; versions that are: {known}; load it first")


def _require_idle(now: Rollout, model: str, version: str, force: bool) -> None:
    share = now.share_of(version)
    if version == now.default:
        detail = f"{model}/{version} is the default, and answers {share:.4g} of the clients; make another one it first"
        raise Problem("version_in_use", detail)
    if version in now.needed and not force:
        detail = f"{model}/{version} answers {share:.4g} of the clients; roll it back, or force it"
        raise Problem("version_in_use", detail)


@asynccontextmanager
async def open_replica(settings: Settings) -> AsyncIterator[Replica]:
    """Reach Redis (or start a private one), load the models, and answer a first batch by each.

    Raises:
        BundleError: a model cannot be served.
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        SettingsError: a setting that this machine or model cannot serve, or one that contradicts another.
    """
    async with AsyncExitStack() as stack:  # closes what is opened, the last one first
        replica = Replica(settings, await open_shared(settings, stack))
        await replica.open(stack)
        about = partial(replica.about, Stages(replica.metrics))
        speaker = Speaker(replica.shared.presence, replica.shared.name, about, replica.metrics.background)
        stack.push_async_callback(speaker.aclose)
        speaker.start()
        yield replica
