"""True labels of answered rows: counted once each, in the client's state, and pooled over all clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from acclimate_service.clients.replies import Replies
from acclimate_service.clients.requests import ClientRequest, Reply
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.configuration import Configurations
from acclimate_service.compute.labelling import Examples, examples_of, feedback_of
from acclimate_service.errors import Problem
from acclimate_service.guard.evidence import Counts, accuracy, verdict
from acclimate_service.guard.policy import Decision
from acclimate_service.guard.record import Label
from acclimate_service.metrics import Telemetry
from acclimate_service.state import ClientScope, ClientUnknown
from acclimate_service.trials.shadows import Guard


class Feedback:
    """Takes labels in, and says what they show.

    All methods raise Problem, and StateError of the state protocol.
    """

    def __init__(
        self,
        configurations: Configurations,
        sessions: Sessions,
        replies: Replies,
        guard: Guard | None,
        telemetry: Telemetry,
    ) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._configurations = configurations
        self._sessions = sessions
        self._replies = replies
        self._guard = guard
        self._telemetry = telemetry

    async def tell(self, request: ClientRequest, told: Sequence[Label] | Examples) -> Reply:
        """Count labels, and let adapters that learn learn; a repeated request does nothing.

        Args:
            request: of whom.
            told: labels of rows that are remembered, which count once each; or images with their labels, whose
                predictions are made now.
        """
        guard = self._required()
        labels = examples_of(told, request.name) if isinstance(told, Examples) else feedback_of(told)
        async with self._sessions.turn(request) as turn:
            await turn.request.admit()
            if await turn.session.known(turn.request) is None:
                raise ClientUnknown(f"there is no client {request.client.client!r}, so it has no rows to label")
            applied = await turn.session.apply(turn.request, labels)
        reply = await self._replies.of(request.client, applied)
        if applied.answer is None:
            return reply
        share = dict(reply.answer["told"])
        counts, configuration = Counts(*share["counts"]), share["configuration"]
        guard.shadows.tell(replace(request, life=applied.life), labels, configuration)
        if counts.labelled:
            await guard.fleet.tell(request.client, configuration, applied.life, applied.seq, share["born"], counts)
        if applied.replayed == "none":
            for result, number in reply.answer["feedback"].items():
                self._telemetry.labels.labels(result).inc(number)
        shown = {name: value for name, value in reply.answer.items() if name != "told"}
        shown["guard"] = describe(counts, guard.fleet.alpha, guard.fleet.decide(counts, configuration))
        return Reply(shown, reply.version, reply.status, True, reply.replayed, reply.lost)

    async def of_client(self, client: ClientScope, configuration: str) -> Mapping[str, Any] | None:
        """What a client's labels show under its present configuration; None without a guard."""
        if self._guard is None:
            return None
        fleet = self._guard.fleet
        counts = await fleet.own(client, configuration)
        return describe(counts, fleet.alpha, fleet.decide(counts, configuration))

    async def of_all(self) -> Mapping[str, Any]:
        """What the labels of all clients show, for each configuration that has any."""
        guard = self._required()
        fleet, candidates = guard.fleet, guard.shadows.configurations
        pooled = await fleet.pooled()
        rows = [
            {
                **self._configurations.describe(configuration),
                "clients": each.clients,
                "candidate": configuration in candidates,
                "guard": describe(each.counts, fleet.alpha),
            }
            for configuration, each in sorted(pooled.items())
        ]
        return {"policy": fleet.policy, "adapters": rows}

    def _required(self) -> Guard:
        if self._guard is None:
            raise Problem("guard_off", "ACCLIMATE_GUARD is off: nobody remembers what the rows were predicted as")
        return self._guard


def describe(counts: Counts, alpha: float, decision: Decision | None = None) -> dict[str, Any]:
    """Evidence in the words of the interface, and what it makes of the answers."""
    given = {} if decision is None else {"answering": decision.answer, "because": decision.because}
    return {
        "verdict": verdict(counts, alpha),
        **given,
        "labelled": counts.labelled,
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
