"""Which model answers a client: its own evidence first, then the operator's policy."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from acclimate_service.guard.evidence import ALPHA, Answer, Counts, Pooled, verdict

Policy: TypeAlias = Literal["adapt", "frozen", "follow-fleet"]
EVERY: Final = "*"
"""Stands for all configurations that are not named."""
Reason: TypeAlias = Literal["own_harmful", "own_trusted", "policy", "fleet_harmful", "fleet_behind", "fleet_not_behind"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whose predictions a client is given, and because of what."""

    answer: Answer
    because: Reason


def decide(own: Counts, fleet: Pooled, policy: Policy, alpha: float = ALPHA) -> Decision:
    """Choose the answer of one client: by its own evidence, else by the policy.

    The two verdicts are never combined, and each is valid by itself: that the fleet's counts hold the client's own rows
    as well counts nothing twice. A client that adaptation does not harm, in a fleet that it does not harm on average,
    is ever called harmful, itself or by its fleet, with a chance of at most 2 alpha.

    Args:
        own: the client's labelled rows under its adapter and model version.
        fleet: those of all clients, this one among them, under the same adapter and model version.
        policy: for clients without a verdict of their own.
        alpha: of each test, 0 to 1, exclusive.

    Raises:
        ValueError: alpha out of range.
    """
    return by_own(own, alpha) or by_policy(fleet, policy, alpha)


@lru_cache(4096)  # every batch asks, and counts change with labels only
def by_own(own: Counts, alpha: float = ALPHA) -> Decision | None:
    """What a client's own evidence decides; None as long as it decides nothing. Arguments as in `decide`."""
    match verdict(own, alpha):
        case "harmful":
            return Decision("frozen", "own_harmful")
        case "trusted":
            return Decision("adapted", "own_trusted")
        case "undecided":
            return None


def by_policy(fleet: Pooled, policy: Policy, alpha: float = ALPHA) -> Decision:
    """What clients without evidence of their own are answered. Arguments as in `decide`.

    `follow-fleet` takes the fleet's verdict. Where that is undecided too, proof would come too late for most of the
    fleet: the adapted answer is given unless it is `behind`. Pooled over clients, the verdict is about the average
    counted row of the fleet; clients may differ as they like.
    """
    if policy != "follow-fleet":
        return Decision("frozen" if policy == "frozen" else "adapted", "policy")
    match fleet.verdict(alpha):
        case "harmful":
            return Decision("frozen", "fleet_harmful")
        case "trusted":
            return Decision("adapted", "fleet_not_behind")
        case "undecided":
            return Decision("frozen", "fleet_behind") if fleet.behind else Decision("adapted", "fleet_not_behind")
