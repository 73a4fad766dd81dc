"""The states of one model's clients: in memory where recent, in Redis always."""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_adapters import FrozenModel, State
from acclimate_service.cache import Entry, StateCache
from acclimate_service.configuration import Configurations
from acclimate_service.problems import Problem
from acclimate_service.state import (
    Absent,
    Attempt,
    Basis,
    ClientScope,
    CommitOutcome,
    Committed,
    Conflict,
    Gone,
    Head,
    Limits,
    Loaded,
    Mismatch,
    Moved,
    Replay,
    StateError,
    StateStore,
    StoreUnavailable,
    Used,
)
from acclimate_service.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Found:
    """The state a batch is to be computed from.

    Args:
        basis: the point of the client's history that it stands for.
        configuration: which adapter goes on with it.
        state: the state.
        status: how it was found: warm, restored, reset or cold.
        remembered: True if Redis was not asked, so that other replicas may have gone on since, or deleted the client.
    """

    basis: Basis
    configuration: str
    state: State
    status: str
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """What a request makes of a client, ready to be committed.

    Args:
        configuration: which adapter goes on with the state.
        state: the new state, and `data`, its bytes.
        answer: JSON of what the caller gets, and whoever repeats the request.
    """

    configuration: str
    state: State
    data: bytes
    answer: bytes


class ClientStates:
    """Finds, commits and removes the states of the clients of one model."""

    def __init__(
        self,
        model: FrozenModel,
        configurations: Configurations,
        store: StateStore,
        limits: Limits,
        cache: StateCache,
        telemetry: Telemetry,
    ) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._model = model
        self._scope = model.content_hash
        self._configurations = configurations
        self._store = store
        self._limits = limits
        self._cache = cache
        self._telemetry = telemetry

    @property
    def model(self) -> str:
        """Content hash of the model."""
        return self._scope

    @property
    def tries(self) -> int:
        """How often a batch is computed anew when other replicas' changes come between."""
        return self._limits.tries

    async def pause(self) -> None:
        """A random moment, so that replicas that met do not meet again."""
        await asyncio.sleep(random.uniform(0, self._limits.jitter_ms) / 1000)

    def cached(self, client: ClientScope) -> Found | None:
        """The state in memory, if it is surely still alive in Redis; a commit proves whether it is the newest."""
        entry = self._cache.get(client.client, time.monotonic() - self._limits.state_ttl_ms / 2000)
        if entry is None:
            self._cache.drop(client.client)
            return None
        self._telemetry.loads.labels("memory").inc()
        return Found(entry.basis, entry.configuration, entry.state, "warm", remembered=True)

    async def find(
        self, client: ClientScope, rid: str, fingerprint: str, admission: str | None = None
    ) -> Found | Replay:
        """Read from Redis: what became of the request, else the state it is to be computed from.

        Args:
            client: whose state.
            rid, fingerprint: the request.
            admission: life of the client when the request was admitted, None at the first read.

        Raises:
            Problem: the request was refused for its key, or the client was deleted since its admission.
            StateError: Redis failed or the stored state is damaged.
        """
        loaded = await self._store.load(client, self._scope, rid)
        while True:
            verdict = loaded.verdict(fingerprint)
            if isinstance(verdict, Replay):
                return verdict
            if verdict is not None:
                raise refusal(verdict)
            if admission is not None and not loaded.continues(admission):
                raise refusal(Gone())
            found = await self._restore(client, loaded)
            if isinstance(found, Found):
                return found
            loaded = found.loaded

    async def look(self, client: ClientScope) -> Found:
        """Read the newest state from Redis, for a request that changes nothing; raises as `find`."""
        found = await self.find(client, "", "")
        assert isinstance(found, Found)  # no request has an empty id, so nothing is ever replayed
        return found

    async def commit(self, client: ClientScope, attempt: Attempt, basis: Basis, change: Change) -> CommitOutcome:
        """Make a change durable: its state, marker and answer in one step.

        Args:
            client: whose state.
            attempt: the request.
            basis: what the change was computed from.
            change: what it makes of the client.

        Raises:
            StateError: Redis failed; its `committed` says whether the change may still have been applied.
        """
        try:
            outcome = await self._store.commit(
                client,
                self._scope,
                basis,
                attempt,
                change.data,
                adapter=change.state.adapter,
                config=change.configuration,
                answer=change.answer,
            )
        except StateError:
            self._cache.drop(client.client)
            raise
        self._telemetry.commits.labels(type(outcome).__name__.lower()).inc()
        if isinstance(outcome, Committed):
            self._cache.put(client.client, Entry(outcome.basis, change.configuration, change.state, time.monotonic()))
        else:
            self._cache.drop(client.client)
        self._telemetry.cache_bytes.set(self._cache.nbytes)
        return outcome

    async def reset(self, client: ClientScope, attempt: Attempt, configuration: str = "") -> tuple[int, str] | None:
        """Take a client back to the global model, under another configuration if one is given.

        Returns:
            The client's version, and whether the answer is "none" or that of an earlier request: "stored". None: there
            is no such client.

        Raises:
            Problem: the request was refused for its key.
            StateError: Redis failed.
        """
        self._cache.drop(client.client)
        outcome = await self._store.reset(client, self._scope, attempt, configuration)
        match outcome:
            case Committed(seq=seq):
                return seq, "none"
            case Replay(seq=seq):
                return seq, "stored"
            case Absent(committed="unknown"):
                raise StoreUnavailable("Redis lost a reply, and the reset may still be carried out", "unknown")
            case Absent() | Gone():
                return None
            case Mismatch() | Used():
                raise refusal(outcome)
            case Conflict(committed=effect):
                raise Problem("conflict", "the client's batches kept coming between; reset again", effect)

    async def delete(self, client: ClientScope) -> None:
        """Remove a client and all that was learned for it; nothing happens when there is none.

        Raises:
            Problem: batches kept coming between.
            StateError: Redis failed.
        """
        self._cache.drop(client.client)
        outcome = await self._store.delete(client)
        if isinstance(outcome, Conflict):
            raise Problem("conflict", "the client's batches kept coming between; delete again", outcome.committed)

    async def describe(self, client: ClientScope) -> Mapping[str, Any]:
        """Adapter, version, size and place of a client's state.

        Raises:
            Problem: there is no such client.
            StateError: Redis failed.
        """
        stored = await self._store.describe(client, self._scope)
        if stored is None:
            raise unknown(client)
        entry = self._cache.get(client.client)
        in_memory = entry is not None and entry.basis.seq == stored.seq
        state = {
            "version": stored.seq,
            "status": "reset" if stored.length == 0 else "warm" if in_memory else "restored",
            "bytes": stored.length,
            "tier": "memory" if in_memory else "redis",
        }
        return {**self._configurations.describe(stored.config), "state": state}

    async def head(self, client: ClientScope, rid: str, fingerprint: str) -> Replay | Head | None:
        """Read from Redis: what became of the request, else the head of the client's state; None: there is none.

        Raises:
            Problem: the request was refused for its key.
            StateError: Redis failed.
        """
        loaded = await self._store.load(client, self._scope, rid)
        verdict = loaded.verdict(fingerprint)
        if verdict is None or isinstance(verdict, Replay):
            return verdict or loaded.head
        raise refusal(verdict)

    async def adapter_of(self, client: ClientScope) -> str:
        """Name of the adapter a client runs, or would begin with."""
        stored = await self._store.describe(client, self._scope)
        adapter: str = self._configurations.describe(stored.config if stored else "")["adapter"]
        return adapter

    async def _restore(self, client: ClientScope, loaded: Loaded) -> Found | Moved:
        entry = self._cache.get(client.client)
        if entry is not None and entry.basis == loaded.basis:
            self._telemetry.loads.labels("memory").inc()
            return Found(entry.basis, entry.configuration, entry.state, "warm")
        self._cache.drop(client.client)
        head = loaded.head
        configuration = head.config if head else self._configurations.default
        restored = await self._store.read_state(client, head) if head else None
        if isinstance(restored, Moved):
            return restored
        self._telemetry.loads.labels("redis" if restored else "none").inc()
        if restored is None:
            state = self._configurations.adapter(configuration).init(self._model)
            return Found(loaded.basis, configuration, state, "reset" if head else "cold")
        state = await asyncio.to_thread(State.from_bytes, restored.state)
        return Found(loaded.basis, configuration, state, "restored")


def refusal(outcome: Mismatch | Used | Gone) -> Problem:
    """Why a change was not applied."""
    match outcome:
        case Mismatch():
            return Problem("key_reused", "this Idempotency-Key was used with another request; use a new key")
        case Used():
            detail = "this Idempotency-Key was used before the client was deleted; use a new key"
            return Problem("key_used_before_delete", detail)
        case Gone():
            return Problem("client_deleted", "the client was deleted while this request was under way")


def unknown(client: ClientScope) -> Problem:
    """There is no such client."""
    return Problem("client_unknown", f"there is no client {client.client!r}; it begins with its first batch")
