"""True labels of answered rows: counted once each, in the client's state, and pooled over all clients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from acclimate_service.clients.requests import ClientRequest, Replies, Reply
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.costs import StepBudget
from acclimate_service.compute.labelling import names_rows, only_counted
from acclimate_service.errors import Problem
from acclimate_service.guard.arms import Arms, Rows
from acclimate_service.guard.evidence import Counts, accuracy, verdict
from acclimate_service.guard.fleet import Fleet, Heard
from acclimate_service.guard.policy import Decision
from acclimate_service.metrics import Metrics
from acclimate_service.state import Batch, ClientUnknown, Head, Paused


class Feedback:
    """Takes labels in, and says what they show.

    All methods raise Problem, and StateError of the state protocol.
    """

    def __init__(
        self,
        configurations: Configurations,
        sessions: Sessions,
        replies: Replies,
        fleet: Fleet | None,
        arms: Arms | None,
        evidence: Sequence[Heard[Any]],
        budget: StepBudget,
        metrics: Metrics,
    ) -> None:
        """Take over the collaborators; whoever made them closes them. Without a fleet there is nothing to be told.

        `evidence` is all that labels of clients say: of the fleet's adapters, and of arms.
        """
        self._configurations = configurations
        self._sessions = sessions
        self._replies = replies
        self._fleet = fleet
        self._arms = arms
        self._evidence = evidence
        self._budget = budget
        self._metrics = metrics

    async def tell(self, request: ClientRequest, labels: Batch) -> Reply:
        """Count labels, and let adapters of clients that are not paused learn; a repeated request does nothing.

        Args:
            request: of whom.
            labels: of rows that are remembered, which count once each; or images with their labels, whose predictions
                are made now. `labelling` makes either.
        """
        fleet = self._required()
        async with self._sessions.turn(request) as turn:
            await turn.request.admit()
            known = await turn.session.known(turn.request)
            if known is None:
                raise ClientUnknown(f"there is no client {request.client.name!r}, so it has no rows to label")
            if isinstance(known, Head) and not names_rows(labels):
                self._budget.require(known.config, labels.shape[0])
                self._budget.require_lesson(known.config, labels.shape[0])
            try:
                applied = await turn.session.apply(turn.request, labels, while_paused=False)
            except Paused as paused:
                if paused.committed is not False:
                    raise
                applied = await turn.session.apply(turn.request, only_counted(labels))
        reply = await self._replies.of(request.client, applied)
        if applied.answer is None:
            return reply
        answer = reply.members
        share = answer["told"]
        counts, configuration = Counts.of_kinds(share["counts"]), share["configuration"]
        when = {"life": applied.life, "seq": applied.seq, "born": share["born"]}
        if counts.labelled:
            await fleet.tell(request.client, configuration, **when, counts=counts)
        rows = Rows.of_kinds(share.get("arms", ()))
        if rows.labelled and self._arms is not None:
            await self._arms.tell(request.client, configuration, **when, counts=rows)
        if applied.replayed == "none":
            for result, number in answer["feedback"].items():
                self._metrics.labels.labels(result).inc(number)
        shown = {name: value for name, value in answer.items() if name != "told"}
        shown["guard"] = describe(counts, fleet.alpha, fleet.decide(counts, configuration))
        return replace(reply, answer=orjson.dumps(shown), configuration=configuration)

    async def of_client(self, request: ClientRequest, configuration: str) -> Mapping[str, Any] | None:
        """What a client's labels show under its present configuration; None without a guard."""
        fleet = self._fleet
        if fleet is None:
            return None
        counts = await fleet.own(request.client, configuration)
        if counts is None:
            async with self._sessions.turn(request) as turn:
                record = (await turn.session.present()).state.record
            counts = record.counts if record else Counts()
        return describe(counts, fleet.alpha, fleet.decide(counts, configuration))

    async def of_all(self, challengers: Collection[str]) -> Mapping[str, Any]:
        """What the labels of all clients show, for each configuration that has any; some of them are challengers."""
        fleet = self._required()
        pooled = await fleet.pooled()
        rows = [
            {
                **self._configurations.describe(configuration),
                "clients": len(each.clients),
                "candidate": configuration in challengers,
                "guard": {**describe(each.counts, fleet.alpha), "verdict": each.verdict(fleet.alpha)},
            }
            for configuration, each in sorted(pooled.items())
        ]
        return {"policy": fleet.policy, "adapters": rows}

    async def reset(self) -> None:
        """Let nothing count for the fleet that any client told so far."""
        self._required()
        for fleet in self._evidence:
            await fleet.reset()

    def _required(self) -> Fleet:
        if self._fleet is None:
            raise Problem("guard_off", "ACCLIMATE_GUARD is off: nobody remembers what the rows were predicted as")
        return self._fleet


def describe(counts: Counts, alpha: float, decision: Decision | None = None) -> dict[str, Any]:
    """Evidence in the words of the interface, and what it makes of the answers."""
    given = {} if decision is None else {"answering": decision.answer, "because": decision.because}
    return {
        "verdict": verdict(counts, alpha),
        **given,
        "labelled": counts.labelled,
        "asked": sum(counts.asked),
        "wins": counts.wins,
        "losses": counts.losses,
        "frozen": _interval(counts, "frozen", alpha),
        "adapted": _interval(counts, "adapted", alpha),
    }


def _interval(counts: Counts, which: Any, alpha: float) -> dict[str, float | None]:
    if not counts.labelled:
        return {"accuracy": None, "low": None, "high": None}
    found = accuracy(counts, which, alpha)
    return {"accuracy": found.estimate, "low": found.low, "high": found.high}
