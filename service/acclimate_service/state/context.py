"""What all parts of a session share."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from acclimate_service.state.held import Track
from acclimate_service.state.limits import Limits
from acclimate_service.state.machine import Machine, Policy, S
from acclimate_service.state.observing import Observer, Silent
from acclimate_service.state.redis.keys import ClientScope, new_id
from acclimate_service.state.store import StateStore


@dataclass(frozen=True, slots=True)
class Context(Generic[S]):
    """One client in one model scope, as one replica serves it.

    Args:
        store: the states of all clients.
        limits: those of the store.
        client: the client.
        model: the model scope.
        machine: how its states are computed.
        policy: what the operator decided.
        observer: told of what happens.
        clock: monotonic seconds.
        nonce: names this session in its fences.
    """

    store: StateStore
    limits: Limits
    client: ClientScope
    model: str
    machine: Machine[S]
    policy: Policy
    observer: Observer = field(default_factory=Silent)
    clock: Callable[[], float] = time.monotonic
    nonce: str = field(default_factory=new_id)

    def written_whole(self, size: int, batch_bytes: int) -> bool:
        """Whether a state of that many bytes is written itself, instead of the batch that changes it."""
        return not self.policy.journal or size <= self.limits.inline_max or self.outweighed(size, batch_bytes)

    def outweighed(self, size: int, batch_bytes: int) -> bool:
        """Whether a state is so much smaller than its batch that it goes into its head whatever `inline_max` says."""
        return size <= min(batch_bytes, self.limits.full_max)

    async def pause(self) -> None:
        """A random moment, so that replicas that met do not meet again."""
        await asyncio.sleep(random.uniform(0, self.limits.jitter_ms) / 1000)

    async def settle(self, track: Track, until: int) -> None:
        """Store the answers owed up to a version; a request whose marker is gone cannot be repeated, nor answered.

        Raises:
            StateError: Redis failed; some may still be owed.
        """
        for seq, owed in sorted(track.owed.items()):
            if seq <= until:
                await self.store.journal.answer(self.client, owed.rid, owed.tag, owed.answer)
                track.owed.pop(seq, None)
