"""The versions of one model that a replica has in memory, and which of them answers a client."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from acclimate_service.models import load_model
from acclimate_service.opening import Shared
from acclimate_service.rollout import Rollout, place_of
from acclimate_service.service import Service, open_version
from acclimate_service.settings import Settings
from acclimate_service.shadow import Shadow
from acclimate_service.state import ClientScope, Tasks

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """One model.

    Args:
        name: of it.
        settings: for it.
        shared: what the services of all models stand on.
        wanted: what is noted in Redis, as far as it was heard.
        stack: closes all versions.

    Attributes:
        applied: what clients are answered by: `wanted`, once all that this needs is in memory.
        versions: in memory, by version.
        failed: why versions that are wanted are not, by version.
        default: answers all clients that no canary takes.
        canary: answers its share of them; None where there is none.
    """

    name: str
    settings: Settings
    shared: Shared
    wanted: Rollout
    stack: AsyncExitStack
    applied: Rollout = field(init=False)
    versions: dict[str, Service] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    default: Service = field(init=False)
    canary: Service | None = None
    _scopes: dict[str, Service] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)
    _tasks: dict[str, Tasks] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def report(self) -> Mapping[str, Any]:
        """What other replicas are told."""
        number = self.applied.number if self.versions else -1
        return {"loaded": sorted(self.versions), "failed": self.failed, "number": number}

    @property
    def obstacle(self) -> str | None:
        """Why clients are not answered by the versions that they should be; None if they are."""
        lacking = sorted(self.wanted.needed - self.versions.keys())
        if not lacking:
            return None
        reasons = [f"{self.name}/{version}: {self.failed.get(version, 'it is being loaded')}" for version in lacking]
        return f"clients are to be answered by what is not loaded here: {'; '.join(reasons)}"

    def of(self, client: ClientScope) -> Service:
        """What answers a client."""
        if self.canary is not None and place_of(client, self.applied.canary) < self.applied.share:
            return self.canary
        return self.default

    async def open(self) -> None:
        """Load what is wanted; raises what loading raises of a version that clients need."""
        for version in dict.fromkeys((*sorted(self.wanted.needed), *self.wanted.loaded)):
            if version in self.wanted.needed:
                await self._load(version)
            else:
                await self._try(version)
        self._apply()

    async def load(self, version: str) -> None:
        """Have a version in memory, which answers nobody yet.

        Raises:
            BundleError: it must not be served.
            SettingsError: it cannot be served with the settings.
            StateError: Redis failed.
        """
        async with self._changing:
            if version not in self.versions:
                await self._load(version)

    async def follow(self, wanted: Rollout) -> None:
        """Load what is wanted now, let clients be answered by it once it is there, and let go of what is not wanted."""
        async with self._changing:
            if wanted.number < self.wanted.number or wanted.number <= self.applied.number:
                return
            self.wanted = wanted
            for version in wanted.loaded:
                if version not in self.versions:
                    await self._try(version)
            for version in self.failed.keys() - set(wanted.loaded):
                self._forgive(version)
            if self.obstacle is None:
                self._apply()
            for version in self.versions.keys() - {*wanted.loaded, *self.applied.needed}:
                await self._unload(version)

    def _apply(self) -> None:
        self.applied, canary = self.wanted, self.wanted.canary
        self.default = self.versions[self.applied.default]
        self.canary = self.versions[canary] if canary else None
        shadow = self._shadow()
        for version, service in self.versions.items():
            service.shadow = None if version == self.applied.shadow else shadow

    def _shadow(self) -> Shadow | None:
        """What is shown what the others answered: it is not waited for, where it could not be loaded."""
        version, share = self.applied.shadow, self.applied.shadow_share
        if version not in self.versions:
            return None
        engine, metrics = self.versions[version].engine, self.shared.metrics
        return Shadow(self.name, version, engine, share, metrics, self._tasks[version])

    async def _try(self, version: str) -> None:
        """Load a version that nobody waits for; what fails is told to the operator."""
        try:
            await self._load(version)
        except Exception as error:
            self.failed[version] = str(error)
            self.shared.metrics.background.failed(self._task(version), error)

    def _task(self, version: str) -> str:
        return f"load of {self.name}/{version}"

    def _forgive(self, version: str) -> None:
        """Say no longer that a version could not be loaded."""
        if self.failed.pop(version, None) is not None:
            self.shared.metrics.background.succeeded(self._task(version))

    async def _load(self, version: str) -> None:
        settings = self.settings.model_copy(update={"model": f"{self.name}/{version}"})
        own = await self.stack.enter_async_context(AsyncExitStack())
        try:
            model = await load_model(settings, self.shared.worker)
            service = await open_version(model, self.shared, own)
            tasks = Tasks(self.shared.metrics.background)
            own.push_async_callback(tasks.aclose)
        except BaseException:
            await own.aclose()
            raise
        service.siblings = self._scopes
        self._forgive(version)
        self.versions[version], self._stacks[version], self._tasks[version] = service, own, tasks
        self._divide()

    async def _unload(self, version: str) -> None:
        """Let a version go that answers no clients any more, once its last requests are answered."""
        service, own = self.versions.pop(version), self._stacks.pop(version)
        del self._tasks[version]
        service.idle = asyncio.Event()
        if service.under_way:
            await service.idle.wait()
        await own.aclose()
        self._divide()
        _log.warning("%s/%s is unloaded", self.name, version)

    def _divide(self) -> None:
        self._scopes.clear()
        self._scopes.update({each.scope: each for each in self.versions.values()})
        for each in self.versions.values():
            each.kept.divide(len(self.versions))
