"""Opt-in: a candidate that the labels prove better takes the place of the adapter that clients have by default.

Beside a candidate's states lie records of pairs: of each row that both saw, what the client was answered and what the
candidate would have answered. They are judged by the same labels and the same test as adapted and frozen predictions, a
win being a row that only the candidate has right. Pooled over the fleet, the verdict says what clients begin with that
begin now. A client's own verdict moves that client, which begins anew under the candidate. Only clients with the
default configuration are ever moved, so whoever was given another adapter keeps it. Whoever is moved and then given the
default again stays there as long as Redis remembers the move, which is as long as any idempotency key.

Each candidate is a test of its own; each has its share of alpha, so that the chance that any of them ever wins the
fleet without being better is at most alpha.
"""

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import orjson

from acclimate_service.clients.requests import ClientRequest
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.adapted import Adapted
from acclimate_service.compute.labelling import names_rows, pairs_of
from acclimate_service.guard.evidence import Counts, gain, verdict
from acclimate_service.guard.fleet import Fleet
from acclimate_service.metrics import Telemetry
from acclimate_service.state import Batch, Change, ClientScope, Present

PATIENCE_S: Final = 60.0
_log = logging.getLogger(__name__)


class Beginnings:
    """Which configuration new clients begin with, as this replica last heard of the fleet's pairs.

    Args:
        default: unless a candidate is better.
        evidence: of the pairs of each candidate, by its configuration.
        telemetry: counts the changes.
        switches: whether a better candidate takes its place at all.
    """

    def __init__(self, default: str, evidence: Fleet, telemetry: Telemetry, *, switches: bool) -> None:
        self.default = default
        self.evidence = evidence
        self._telemetry = telemetry
        self._latest = default
        self._switches = switches

    def configuration(self) -> str:
        """Of a client that begins now: of the candidates that are better than the default, the surest one."""
        if not self._switches:
            return self.default
        heard = {name: pooled.counts for name, pooled in self.evidence.heard().items()}
        better = {name: gain(counts, self.evidence.alpha).low for name, counts in heard.items() if self.proves(counts)}
        chosen = max(better, key=better.__getitem__, default=self.default)
        if chosen != self._latest:
            self._latest = chosen
            self.report("new clients begin", chosen, "fleet")
        return chosen

    def proves(self, counts: Counts) -> bool:
        """Whether pairs prove that their candidate is better."""
        return verdict(counts, self.evidence.alpha) == "trusted"

    def report(self, who: str, configuration: str, because: str) -> None:
        """Count and log a change."""
        self._telemetry.adapter_switches.labels(orjson.loads(configuration)["adapter"], because).inc()
        _log.warning("%s with %s from now on, by the labels: %s", who, configuration, because)


class _Stays(Exception):
    """The client has no longer what it would be moved from."""


class Duels:
    """Keeps the pairs of every candidate, and moves clients to a better one.

    Args:
        beginnings: for new clients.
        pairs: sessions of the records of pairs, by the candidate's configuration.
        clients: sessions of the clients themselves.
        fleet: evidence of the adapters, which begins anew for a client that is moved.
        initial: makes the state that a configuration begins with.
    """

    def __init__(
        self,
        beginnings: Beginnings,
        pairs: Mapping[str, Sessions],
        clients: Sessions,
        fleet: Fleet,
        initial: Callable[[str], Awaitable[Adapted]],
    ) -> None:
        self._beginnings = beginnings
        self._pairs = pairs
        self._clients = clients
        self._fleet = fleet
        self._initial = initial

    @property
    def sessions(self) -> Sequence[Sessions]:
        """Of all records of pairs."""
        return tuple(self._pairs.values())

    async def forget(self, client: ClientScope) -> None:
        """Forget who told what a deleted client told; raises StateError where Redis fails."""
        await self._beginnings.evidence.forget(client)

    async def see(
        self, candidate: str, request: ClientRequest, current: str, given: Sequence[int], answer: Mapping[str, Any]
    ) -> None:
        """Remember a batch that both answered.

        Args:
            candidate: its configuration.
            request: of the batch.
            current: configuration of the client.
            given: [B], the classes that the client was answered.
            answer: of the candidate.
        """
        if current != self._beginnings.default:
            return
        would = [each["index"] for each in answer["predictions"]]
        async with self._pairs[candidate].turn(derived(request, f"pair {candidate}")) as turn:
            await turn.session.apply(turn.request, pairs_of(request.name, given, would))

    async def tell(self, candidate: str, request: ClientRequest, current: str, labels: Batch) -> None:
        """Count labels of rows that both answered, and move the client if its own prove the candidate better."""
        if current != self._beginnings.default or not names_rows(labels):
            return
        async with self._pairs[candidate].turn(derived(request, f"pair {candidate}")) as turn:
            if await turn.session.known(turn.request) is None:
                return
            applied = await turn.session.apply(turn.request, labels)
        share = {} if applied.answer is None else orjson.loads(applied.answer)["told"]
        counts = Counts(*share.get("counts", ()))
        if counts.labelled:
            evidence = self._beginnings.evidence
            await evidence.tell(request.client, candidate, applied.life, applied.seq, share["born"], counts)
        if self._beginnings.proves(counts):
            with suppress(_Stays):
                await self._move(candidate, request)

    async def _move(self, candidate: str, request: ClientRequest) -> None:
        """Let the client begin anew under the candidate, unless it was moved before or anybody configures it meanwhile.

        Raises:
            _Stays: it has another configuration than the default.
        """
        initial = await self._initial(candidate)

        async def begin(present: Present[Adapted]) -> Change[Adapted]:
            if not present.seq or present.config != self._beginnings.default:
                raise _Stays
            return Change(candidate, initial, b"{}")

        client = request.client
        rid = hashlib.sha256(f"{client.rid('')}\0{request.life}\0{candidate}".encode()).hexdigest()[: len(request.rid)]
        async with self._clients.turn(replace(derived(request, ""), rid=rid, fingerprint=rid)) as turn:
            moved = await turn.session.replace(turn.request, begin)
        if moved.replayed == "none":
            self._beginnings.report(f"client {client.client} goes on", candidate, "own")
            await self._fleet.begin_anew(client, candidate, moved.life, moved.seq)


def derived(request: ClientRequest, what: str) -> ClientRequest:
    """The same request for something that is done in the background, under an id of its own."""
    rid = hashlib.sha256(f"{request.rid}\0{what}".encode()).hexdigest()[: len(request.rid)]
    return replace(request, rid=rid, deadline=time.monotonic() + PATIENCE_S, gone=_never, number=0)


async def _never() -> bool:
    """No caller waits for it."""
    return False
