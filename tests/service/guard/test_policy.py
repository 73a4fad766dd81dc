from statistics import mean, median

import numpy as np
import pytest

from acclimate_service.guard.evidence import Counts, Pooled
from acclimate_service.guard.policy import Decision, Policy, decide

NONE, NO_FLEET = Counts(), Pooled()
HARMFUL = Counts(wins=4, losses=30, labelled=100, frozen_right=80, adapted_right=54)
TRUSTED = Counts(wins=30, losses=4, labelled=100, frozen_right=54, adapted_right=80)
UNDECIDED = Counts(wins=3, losses=6, labelled=50, frozen_right=40, adapted_right=37)
POLICIES: tuple[Policy, ...] = ("adapt", "frozen", "follow-fleet")
CLIENTS, BATCHES, ROWS = 40, 12, 25


def discordant(wins: int, losses: int, ties: int = 0) -> Counts:
    """Ties that both predictions have right."""
    return Counts(wins, losses, wins + losses + ties, losses + ties, wins + ties)


HARMFUL_FLEET = Pooled((discordant(1, 5),) * 10)
TRUSTED_FLEET = Pooled((discordant(5, 1),) * 10)
BEHIND_FLEET = Pooled((discordant(1, 2),) * 5)
LEADING_FLEET = Pooled((discordant(2, 1),) * 5)


def counted(outcomes: list[int]) -> Counts:
    """Wins (1), losses (-1) and rows that both predictions have right (0)."""
    wins, losses, rows = outcomes.count(1), outcomes.count(-1), len(outcomes)
    return Counts(wins, losses, rows, rows - wins, rows - losses)


def answered_gain(wins: float, losses: float, share: float, seed: int) -> tuple[float, float]:
    """Gain of the answers over frozen ones in the first and second half, clients taking turns.

    Args:
        wins, losses: chance that only the adapted, or only the frozen, prediction of a row is right.
        share: of rows whose label is told after the answer.
        seed: of the stream.
    """
    rng = np.random.default_rng(seed)
    own, gains = [NONE] * CLIENTS, []
    for _ in range(BATCHES):
        for client in range(CLIENTS):
            answer = decide(own[client], Pooled(tuple(each for each in own if each.labelled)), "follow-fleet").answer
            outcome = rng.choice([1, -1, 0], size=ROWS, p=[wins, losses, 1 - wins - losses])
            gains.append(outcome.mean() if answer == "adapted" else 0.0)
            told = outcome[rng.random(ROWS) < share]
            own[client] += counted(told.tolist())
    return mean(gains[: len(gains) // 2]), mean(gains[len(gains) // 2 :])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", [NO_FLEET, HARMFUL_FLEET, TRUSTED_FLEET])
def test_a_clients_own_verdict_comes_before_fleet_and_policy(policy: Policy, fleet: Pooled) -> None:
    assert decide(HARMFUL, fleet, policy) == Decision("frozen", "own_harmful")
    assert decide(TRUSTED, fleet, policy) == Decision("adapted", "own_trusted")


@pytest.mark.parametrize("own", [NONE, UNDECIDED])
@pytest.mark.parametrize("fleet", [NO_FLEET, HARMFUL_FLEET, TRUSTED_FLEET])
def test_without_an_own_verdict_a_fixed_policy_ignores_the_fleet(own: Counts, fleet: Pooled) -> None:
    assert decide(own, fleet, "adapt") == Decision("adapted", "policy")
    assert decide(own, fleet, "frozen") == Decision("frozen", "policy")


@pytest.mark.parametrize("own", [NONE, UNDECIDED])
def test_a_follower_adapts_until_frozen_answers_are_ahead_in_the_fleet(own: Counts) -> None:
    for fleet in (NO_FLEET, LEADING_FLEET, TRUSTED_FLEET):
        assert decide(own, fleet, "follow-fleet") == Decision("adapted", "fleet_not_behind")
    assert decide(own, BEHIND_FLEET, "follow-fleet") == Decision("frozen", "fleet_behind")
    assert decide(own, HARMFUL_FLEET, "follow-fleet") == Decision("frozen", "fleet_harmful")


@pytest.mark.parametrize(
    ("wins", "losses", "answer"),
    [(1, 0, "adapted"), (0, 1, "frozen"), (5, 5, "frozen"), (12, 10, "frozen"), (13, 10, "adapted")],
)
def test_an_undecided_fleet_adapts_while_it_leads_by_half_a_standard_deviation(
    wins: int, losses: int, answer: str
) -> None:
    fleet = Pooled((discordant(wins, losses), discordant(0, 0, ties=1)), needed=1)
    assert decide(NONE, fleet, "follow-fleet").answer == answer


@pytest.mark.parametrize("rows", [1, 32])
def test_four_clients_freeze_no_other_and_the_fifth_does(rows: int) -> None:
    liars = (discordant(0, rows),) * 4
    assert decide(NONE, Pooled(liars), "follow-fleet") == Decision("adapted", "fleet_not_behind")
    assert decide(NONE, Pooled((*liars, discordant(0, 0, ties=1))), "follow-fleet").answer == "frozen"


def test_one_liar_does_not_turn_a_fleet_that_leads_by_more_than_its_weight() -> None:
    honest = (discordant(2, 1),) * 12 + (discordant(0, 0, ties=9),) * 5
    assert decide(NONE, Pooled(honest), "follow-fleet").answer == "adapted"
    assert decide(NONE, Pooled((*honest, discordant(0, 32))), "follow-fleet").answer == "adapted"


@pytest.mark.parametrize("losses", [0, 1, 2, 5])
def test_a_trusted_fleet_is_always_adapted(losses: int) -> None:
    wins = next(n for n in range(losses, 10**3) if Pooled((discordant(n, losses),) * 9).verdict() == "trusted")
    few = (discordant(wins, losses),) * 9
    assert decide(NONE, Pooled(few), "follow-fleet").answer == "adapted"


def test_a_client_counts_for_its_fleet_too() -> None:
    assert decide(UNDECIDED, Pooled((UNDECIDED,) * 30), "follow-fleet").because == "fleet_harmful"


def test_a_stricter_alpha_holds_a_decision_back() -> None:
    assert decide(HARMFUL, NO_FLEET, "adapt", alpha=1e-9) == Decision("adapted", "policy")


def test_harm_to_every_client_is_over_in_the_second_half_with_a_twentieth_of_the_labels() -> None:
    halves = [answered_gain(wins=0.03, losses=0.10, share=0.05, seed=seed) for seed in range(9)]
    assert median(first for first, _ in halves) >= -0.01
    assert min(second for _, second in halves) >= -0.01


def test_help_is_kept() -> None:
    assert mean(answered_gain(wins=0.10, losses=0.03, share=0.05, seed=seed)[1] for seed in range(9)) >= 0.065
