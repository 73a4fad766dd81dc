"""Opt-in: a challenger that the labels prove better takes the place of the champion, the adapter of clients by default.

Beside a challenger's states lie records of pairs: of each row that both saw, what the client was answered and what the
challenger would have answered. This is a paired trial. Its pairs are judged by the same labels and the same test as
adapted and frozen predictions, a win being a row that only the challenger has right. Pooled over the fleet, the verdict
says what clients begin with that begin now. A client's own verdict promotes the challenger for that client, which
restarts under it. Only clients with the default configuration are ever moved, so whoever was given another adapter
keeps it. Whoever is moved and then given the default again stays there as long as Redis remembers the move, which is as
long as any idempotency key.

Each challenger is a test of its own; each has its share of alpha, so that the chance that any of them ever wins the
fleet without being better is at most alpha.
"""

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import orjson

from acclimate_service.clients.requests import ClientRequest
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.labelling import names_rows, pairs_of
from acclimate_service.guard.evidence import Counts, gain, verdict
from acclimate_service.guard.fleet import Fleet
from acclimate_service.logs import hashed
from acclimate_service.metrics import Metrics
from acclimate_service.state import Batch, Change, Present, event

PATIENCE_S: Final = 60.0
_log = logging.getLogger(__name__)


class Champion:
    """Which configuration new clients begin with, as this replica last heard of the fleet's pairs.

    Args:
        default: unless a challenger is better.
        evidence: of the pairs of each challenger, by its configuration; None if nobody is promoted.
        metrics: counts the promotions.
        secret: by which clients are hashed in the log.
    """

    def __init__(self, default: str, evidence: Fleet | None, metrics: Metrics, secret: str) -> None:
        self.default = default
        self._evidence = evidence
        self._metrics = metrics
        self._secret = secret
        self._latest = default

    def configuration(self) -> str:
        """Of a client that begins now: of the challengers that are better than the default, the surest one."""
        if self._evidence is None:
            return self.default
        alpha = self._evidence.alpha
        proven = {name: pooled for name, pooled in self._evidence.heard().items() if pooled.verdict(alpha) == "trusted"}
        better = {name: gain(pooled.counts, alpha).low for name, pooled in proven.items()}
        chosen = max(better, key=better.__getitem__, default=self.default)
        if chosen != self._latest:
            self._latest = chosen
            self._report("new clients begin", chosen, "fleet")
        return chosen

    def moved(self, client: str, configuration: str) -> None:
        """Count and log that a client goes on with a challenger, by its own labels."""
        self._report(f"client {hashed(self._secret, client)} goes on", configuration, "own")

    def _report(self, who: str, configuration: str, because: str) -> None:
        self._metrics.adapter_switches.labels(orjson.loads(configuration)["adapter"], because).inc()
        _log.warning("%s with %s from now on, by the labels: %s", who, configuration, because)


class _Stays(Exception):
    """The client has no longer what it would be moved from."""


@dataclass(slots=True)
class PairedTrial:
    """Keeps the pairs of one challenger, and promotes it for clients whose own labels prove it better.

    Args:
        challenger: its configuration.
        champion: what it is compared with.
        evidence: told what the labels say of the pairs.
        sessions: of the records of pairs.
        clients: sessions of the clients themselves.
        fleet: evidence of the adapters, which restarts for a client that is moved.
        initial: makes the state that a configuration begins with.
    """

    challenger: str
    champion: Champion
    evidence: Fleet
    sessions: Sessions
    clients: Sessions
    fleet: Fleet
    initial: Callable[[str], Awaitable[ClientState]]

    async def see(self, request: ClientRequest, given: Sequence[int], would: Sequence[int], current: str) -> None:
        """Remember a batch that both answered.

        Args:
            request: of the batch.
            given: [B], the classes that the client was answered.
            would: [B], the classes that the challenger would have answered.
            current: configuration of the client.
        """
        if current != self.champion.default:
            return
        async with self.sessions.turn(derived(request, f"pair {self.challenger}")) as turn:
            await turn.session.apply(turn.request, pairs_of(request.name, given, would))

    async def tell(self, request: ClientRequest, labels: Batch, current: str) -> None:
        """Count labels of rows that both answered, and move the client if its own prove the challenger better."""
        if current != self.champion.default or not names_rows(labels):
            return
        async with self.sessions.turn(derived(request, f"pair {self.challenger}")) as turn:
            if await turn.session.known(turn.request) is None:
                return
            applied = await turn.session.apply(turn.request, labels)
        share = {} if applied.answer is None else orjson.loads(applied.answer)["told"]
        counts = Counts.of_kinds(share.get("counts", ()))
        if counts.labelled:
            await self.evidence.tell(
                client=request.client,
                configuration=self.challenger,
                life=applied.life,
                seq=applied.seq,
                born=share["born"],
                counts=counts,
            )
        if verdict(counts, self.evidence.alpha) == "trusted":
            with suppress(_Stays):
                await self._promote(request)

    async def _promote(self, request: ClientRequest) -> None:
        """Restart the client under the challenger, unless it was moved before or anybody configures it meanwhile.

        Raises:
            _Stays: it has another configuration than the default, or is paused.
        """
        initial = await self.initial(self.challenger)

        async def restart(present: Present[ClientState]) -> Change[ClientState]:
            if not present.seq or present.paused or present.config != self.champion.default:
                raise _Stays
            return Change(self.challenger, initial, b"{}", point=event("promoted"))

        client, request = request.client, derived(request, "")
        history = f"{client.rid('')}\0{request.life}\0{self.challenger}"
        rid = hashlib.sha256(history.encode()).hexdigest()[: len(request.rid)]
        async with self.clients.turn(replace(request, rid=rid, fingerprint=rid)) as turn:
            moved = await turn.session.apply(turn.request, restart)
        if moved.replayed == "none":
            self.champion.moved(client.client, self.challenger)
            await self.fleet.restart(client, self.challenger, life=moved.life, seq=moved.seq)


def derived(request: ClientRequest, what: str) -> ClientRequest:
    """The same request for something that is done in the background, under an id of its own."""
    rid = hashlib.sha256(f"{request.rid}\0{what}".encode()).hexdigest()[: len(request.rid)]
    return replace(request, rid=rid, deadline=time.monotonic() + PATIENCE_S, gone=_never, number=0)


async def _never() -> bool:
    """No caller waits for it."""
    return False
