import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from acclimate_adapters.portfolio import SETTLED
from acclimate_service.guard.evidence import CLIENTS, WEIGHT, Counts, Pooled, accuracy, gain, log_evidence, verdict

ALPHA = 0.05
STREAMS, LABELS = 10_000, 600
MILLION = 1_000_000
counted = st.integers(0, MILLION) | st.integers(0, 30)
MIXES = [(0, 0), (1, 0), (0, 1), (5, 20), (20, 5), (100, 100), (90, 160), (900, 1000), (3000, 2500)]


def counts(wins: int, losses: int, ties: int = 0) -> Counts:
    """Ties that both predictions have right."""
    return Counts(wins, losses, wins + losses + ties, losses + ties, wins + ties)


def slow_log_mean(log_integrand: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
    """Logarithm of an integral over 0..1, by the midpoint rule with a million points."""
    values = log_integrand((np.arange(MILLION) + 0.5) / MILLION)
    return float(values.max() + np.log(np.exp(values - values.max()).mean()))


def slow_log_capital(ups: int, downs: int, ties: int, mean: float) -> float:
    def growth(u: NDArray[np.float64]) -> NDArray[np.float64]:
        lost = np.log1p(-u) * downs
        return ups * np.log1p(u * (1 - mean) / (1 + mean)) + lost + ties * np.log1p(-u * mean / (1 + mean))

    return slow_log_mean(growth)


@pytest.fixture(scope="module")
def most_wins() -> NDArray[np.int64]:
    """Per number of discordant rows, the largest number of wins whose verdict is harmful; -1 for none."""
    found = [-1]
    for n in range(1, LABELS + 1):
        wins = found[-1]
        while wins + 1 <= n and verdict(counts(wins + 1, n - wins - 1)) == "harmful":
            wins += 1
        found.append(wins)
    return np.array(found)


def ever_harmful(chance: NDArray[np.float64], most_wins: NDArray[np.int64], seed: int) -> float:
    """Share of simulated streams of wins and losses that are called harmful at any of the looks after every label."""
    wins = np.cumsum(np.random.default_rng(seed).random((STREAMS, LABELS)) < chance, axis=1)
    return float((wins <= most_wins[1:]).any(axis=1).mean())


@pytest.mark.parametrize(("favourable", "contrary"), MIXES)
def test_the_closed_form_is_the_integral_over_all_stakes(favourable: int, contrary: int) -> None:
    slow = slow_log_mean(lambda u: favourable * np.log1p(u) + contrary * np.log1p(-u))
    assert log_evidence(favourable, contrary) == pytest.approx(slow, abs=1e-6)


@pytest.mark.parametrize(
    ("favourable", "contrary"), [(0, 0), (7, 3), (3, 7), (40, 40), (60, 21), (11, 300), (800, 850)]
)
def test_the_closed_form_is_exact(favourable: int, contrary: int) -> None:
    f, c, n = favourable, contrary, favourable + contrary
    upper = sum(math.comb(n + 1, j) for j in range(c + 1, n + 2))
    assert log_evidence(f, c) == pytest.approx(math.log(upper) - math.log((n + 1) * math.comb(n, f)), abs=1e-11)


def test_extreme_counts_have_their_exact_evidence() -> None:
    central = -math.log(math.pi * MILLION) / 2 + math.log1p(-1 / (8 * MILLION))  # of C(2n, n) / 4^n
    assert log_evidence(0, 0) == 0
    assert log_evidence(0, MILLION) == pytest.approx(-math.log(MILLION + 1), abs=1e-12)
    expected = (MILLION + 1) * math.log(2) - math.log(MILLION + 1)
    assert log_evidence(MILLION, 0) == pytest.approx(expected, abs=1e-7)
    assert log_evidence(MILLION, MILLION) == pytest.approx(-math.log(2 * MILLION + 1) - central, abs=1e-9)


@given(counted, counted)
def test_at_even_odds_the_evidence_is_a_martingale(favourable: int, contrary: int) -> None:
    now = log_evidence(favourable, contrary)
    more, less = log_evidence(favourable + 1, contrary), log_evidence(favourable, contrary + 1)
    assert np.logaddexp(more, less) - math.log(2) == pytest.approx(now, abs=1e-7)
    assert more > now > less


@given(counted, counted)
def test_no_counts_speak_for_help_and_harm_at_once(wins: int, losses: int) -> None:
    assert min(log_evidence(wins, losses), log_evidence(losses, wins)) <= 0


@pytest.mark.parametrize("chance", [0.5, 0.6])
def test_streams_without_harm_are_hardly_ever_called_harmful(chance: float, most_wins: NDArray[np.int64]) -> None:
    assert ever_harmful(np.full(LABELS, chance), most_wins, seed=1) <= ALPHA


def test_help_is_claimed_by_the_mirrored_test(most_wins: NDArray[np.int64]) -> None:
    for n, losses in enumerate(most_wins.tolist()):
        for k in {losses, losses + 1} & set(range(n + 1)):
            assert (verdict(counts(n - k, k)) == "trusted") == (k <= losses)


def test_unlike_clients_whose_harm_and_help_balance_are_hardly_ever_called_harmful(
    most_wins: NDArray[np.int64],
) -> None:
    assert ever_harmful(np.where(np.arange(LABELS) % 2, 0.1, 0.9), most_wins, seed=2) <= ALPHA


def test_help_that_turns_into_harm_is_hardly_ever_called_harmful_before_it_outweighs(
    most_wins: NDArray[np.int64],
) -> None:
    assert ever_harmful(np.where(np.arange(LABELS) < LABELS // 2, 0.7, 0.3), most_wins, seed=3) <= ALPHA


def asked_harmful(most_wins: NDArray[np.int64], seed: int, *, may_owe: float) -> float:
    """Share of simulated streams that are ever called harmful where whoever asks does the best to have them so.

    The asker knows all labels told so far, and at each time what chance of a win the rows have that may be asked, 0.3,
    0.5 or 0.7. While wins are ahead, rows are asked in which they are likely; once losses are, those in which they are
    not, as long as the mean chance of the rows asked is 1/2 or more, less what may be owed in all.
    """
    rng, wins, saved = np.random.default_rng(seed), np.zeros(STREAMS, int), np.zeros(STREAMS)
    harmful = np.zeros(STREAMS, bool)
    for asked in range(1, LABELS + 1):
        behind = 2 * wins < asked - 1
        chance = np.where(behind, np.where(saved + may_owe >= 0.2 - 1e-9, 0.3, 0.5), 0.7)
        saved += chance - 0.5
        wins += rng.random(STREAMS) < chance
        harmful |= wins <= most_wins[asked]
    assert bool((saved >= -may_owe - 1e-6).all())
    return float(harmful.mean())


def test_no_timing_of_what_is_asked_convicts_who_is_not_harmed(most_wins: NDArray[np.int64]) -> None:
    assert asked_harmful(most_wins, seed=7, may_owe=0) <= ALPHA


def test_asking_more_where_adaptation_harms_breaks_the_bound_of_the_simulation(most_wins: NDArray[np.int64]) -> None:
    assert asked_harmful(most_wins, seed=8, may_owe=20) > 2 * ALPHA


def told_rows(rng: np.random.Generator, rows: int) -> list[tuple[int, int, int]]:
    """Frozen, adapted and true class of rows, a fifth of which differ: 90 % right where not, else 30 % and 50 %."""
    draw = rng.random((rows, 2))
    there = np.where(draw[:, 1] < 0.3, 1, np.where(draw[:, 1] < 0.8, 2, 3))
    elsewhere = np.where(draw[:, 1] < 0.9, 1, 3)
    differ = draw[:, 0] < 0.2
    labels = np.where(differ, there, elsewhere)
    return [(1, 2 if each else 1, int(label)) for each, label in zip(differ, labels, strict=True)]


FROZEN, ADAPTED = 0.2 * 0.3 + 0.8 * 0.9, 0.2 * 0.5 + 0.8 * 0.9


def chosen(rng: np.random.Generator, unasked: int, asked: int) -> Counts:
    """Labels of so many rows drawn at random, and of so many that were asked for, which all differ."""
    differing = [row for row in told_rows(rng, 20 * asked) if row[0] != row[1]][:asked]
    return sum(
        (
            Counts.of(*row, asked=each)
            for rows, each in ((told_rows(rng, unasked), False), (differing, True))
            for row in rows
        ),
        Counts(),
    )


def test_accuracies_are_those_of_all_rows_however_many_were_asked_for() -> None:
    told = chosen(np.random.default_rng(0), unasked=2000, asked=2000)
    assert told.frozen_right / told.labelled == pytest.approx(0.5 * (FROZEN + 0.3), abs=0.02), "as if none was asked"
    assert accuracy(told, "frozen").estimate == pytest.approx(FROZEN, abs=0.02)
    assert accuracy(told, "adapted").estimate == pytest.approx(ADAPTED, abs=0.02)


def test_weights_leave_less_chance_than_unasked_labels_alone() -> None:
    rng = np.random.default_rng(1)
    weighted, alone = list[float](), list[float]()
    for _ in range(60):
        told = chosen(rng, unasked=60, asked=60)
        unasked = Counts.of_kinds(told.kinds[:5])
        weighted.append((accuracy(told, "adapted").estimate or 0) - (accuracy(told, "frozen").estimate or 0))
        alone.append((accuracy(unasked, "adapted").estimate or 0) - (accuracy(unasked, "frozen").estimate or 0))
    assert np.mean(weighted) == pytest.approx(ADAPTED - FROZEN, abs=0.02)
    assert np.std(weighted) < 0.8 * np.std(alone)


@pytest.mark.slow
def test_bounds_of_weighted_accuracies_hold_at_every_look() -> None:
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(60):
        told = Counts()
        outside = False
        for _ in range(4):
            told += chosen(rng, unasked=30, asked=10)
            interval = accuracy(told, "adapted")
            outside |= not interval.low <= ADAPTED <= interval.high
        wrong += outside
    assert wrong <= 6, "each bound is wrong in one stream of twenty at most"


def test_where_all_labels_were_asked_for_there_are_bounds_and_no_accuracy() -> None:
    told = chosen(np.random.default_rng(3), unasked=0, asked=30)
    for answer in ("frozen", "adapted"):
        estimate, low, high = accuracy(told, answer)  # type: ignore[arg-type]
        assert (estimate, low < 0.05, high) == (None, True, 1.0)
    assert accuracy(Counts(), "frozen") == (None, 0.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=30))
def test_kinds_say_all_that_counts_do_and_add_up(rows: list[tuple[int, int, int, bool]]) -> None:
    each = [Counts.of(*row[:3], asked=row[3]) for row in rows]
    told = sum(each, Counts())
    assert Counts.of_kinds(told.kinds) == told
    assert told.kinds == tuple(map(sum, zip(Counts().kinds, *(one.kinds for one in each), strict=True)))
    assert told.labelled == len(rows)
    assert sum(told.asked) == sum(row[3] for row in rows)
    assert told.frozen_right == sum(row[0] == row[2] for row in rows)
    assert told.wins + told.losses + told.astray <= sum(row[0] != row[1] for row in rows)


def test_a_slight_harm_breaks_the_bound_of_the_simulation(most_wins: NDArray[np.int64]) -> None:
    assert ever_harmful(np.full(LABELS, 0.45), most_wins, seed=4) > 2 * ALPHA


def test_fifteen_points_of_harm_are_found_within_a_hundred_labels_in_the_median(
    most_wins: NDArray[np.int64],
) -> None:
    draws = np.random.default_rng(5).random((STREAMS, 100))
    wins, losses = np.cumsum(draws < 0.05, axis=1), np.cumsum(draws > 0.80, axis=1)
    assert (wins <= most_wins[wins + losses]).any(axis=1).mean() >= 0.5


def test_the_verdict_turns_with_the_evidence() -> None:
    told = [counts(0, 30), counts(25, 0), counts(90, 0)]
    assert [verdict(sum(told[: n + 1], Counts())) for n in range(3)] == ["harmful", "undecided", "trusted"]


def test_ties_are_no_evidence() -> None:
    assert verdict(counts(6, 21, ties=10**5)) == verdict(counts(6, 21)) == "harmful"
    assert verdict(counts(0, 0, ties=10**5)) == "undecided"


@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from([0.01, 0.05, 0.2]))
def test_a_stricter_alpha_needs_more_evidence(wins: int, losses: int, alpha: float) -> None:
    strict = verdict(counts(wins, losses), alpha / 2)
    assert strict in {"undecided", verdict(counts(wins, losses), alpha)}


@pytest.mark.parametrize(
    ("frozen", "adapted", "label", "expected"),
    [
        (3, 7, 7, Counts(wins=1, labelled=1, adapted_right=1)),
        (3, 7, 3, Counts(losses=1, labelled=1, frozen_right=1)),
        (3, 3, 3, Counts(labelled=1, frozen_right=1, adapted_right=1)),
        (3, 7, 1, Counts(labelled=1, astray=1)),
        (3, 3, 1, Counts(labelled=1)),
    ],
)
def test_a_row_is_a_win_a_loss_or_a_tie(frozen: int, adapted: int, label: int, expected: Counts) -> None:
    assert Counts.of(frozen, adapted, label) == expected


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3)), st.integers(0, 20))
def test_rows_add_up_in_any_order_and_grouping(rows: list[tuple[int, int, int]], cut: int) -> None:
    each = [Counts.of(*row) for row in rows]
    total = sum(each, Counts())
    assert total == sum(reversed(each), Counts()) == sum(each[cut:], Counts()) + sum(each[:cut], Counts())
    assert total.labelled == len(rows)
    assert total.adapted_right - total.frozen_right == total.wins - total.losses


@pytest.mark.parametrize(
    "numbers", [(-1, 0, 1, 1, 0), (2, 0, 1, 0, 2), (0, 0, 1, 1, 0), (1, 0, 2, 0, 0), (0, 0, 0, 1, 1)]
)
def test_counts_that_no_rows_can_have_are_refused(numbers: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="contradict each other; accepted are counts >= 0"):
        Counts(*numbers)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_an_alpha_that_is_no_probability_is_refused(alpha: float) -> None:
    for judge in (verdict, gain, lambda c, a: accuracy(c, "frozen", a)):
        with pytest.raises(ValueError, match="accepted is a probability between 0 and 1"):
            judge(Counts(), alpha)


@pytest.mark.parametrize(
    ("wins", "losses", "ties"), [(5, 20, 75), (40, 9, 0), (0, 0, 50), (1, 7, 900), (310, 290, 9400)]
)
def test_the_bounds_of_the_gain_are_where_the_slow_integral_reaches_the_threshold(
    wins: int, losses: int, ties: int
) -> None:
    estimate, low, high = gain(counts(wins, losses, ties))
    assert estimate == (wins - losses) / (wins + losses + ties)
    assert slow_log_capital(wins, losses, ties, low) == pytest.approx(math.log(20), abs=1e-5)
    assert slow_log_capital(losses, wins, ties, -high) == pytest.approx(math.log(20), abs=1e-5)


@pytest.mark.parametrize("losses", [12, 13, 14, 15, 16, 17, 18])
def test_the_gain_leaves_out_nothing_just_where_there_is_a_verdict(losses: int) -> None:
    for told in (counts(4, losses, 60), counts(losses, 4, 60)):
        _, low, high = gain(told)
        assert verdict(told) == ("trusted" if low > 0 else "harmful" if high < 0 else "undecided")


def test_the_interval_of_an_accuracy_is_that_of_its_own_right_and_wrong_rows() -> None:
    told = Counts(wins=10, losses=30, labelled=200, frozen_right=150, adapted_right=130)
    for answer, right in (("frozen", 150), ("adapted", 130)):
        estimate, low, high = accuracy(told, answer)
        assert estimate == right / 200
        assert slow_log_capital(right, 200 - right, 0, 2 * low - 1) == pytest.approx(math.log(20), abs=1e-5)
        assert slow_log_capital(200 - right, right, 0, 1 - 2 * high) == pytest.approx(math.log(20), abs=1e-5)


def test_intervals_hold_the_truth_at_every_look() -> None:
    rng, streams, missed = np.random.default_rng(6), 100, 0
    for _ in range(streams):
        draws = rng.random(240)
        wins, losses = np.cumsum(draws < 0.2), np.cumsum(draws > 0.9)
        looks = [gain(counts(int(wins[n]), int(losses[n]), n + 1 - int(wins[n] + losses[n]))) for n in (29, 89, 239)]
        missed += not all(low <= 0.1 <= high for _, low, high in looks)
    assert missed <= 2 * ALPHA * streams


def test_intervals_narrow_with_the_rows() -> None:
    widths = [high - low for _, low, high in (gain(counts(2 * n, n, 7 * n)) for n in (0, 1, 10, 100, 1000, 100_000))]
    assert widths[0] == 2
    assert all(later < earlier for earlier, later in pairwise(widths))


def test_extreme_counts_have_intervals() -> None:
    assert gain(Counts()) == (None, -1, 1)
    assert accuracy(Counts(), "adapted") == (None, 0, 1)
    always, never = accuracy(counts(MILLION, 0), "adapted"), accuracy(counts(MILLION, 0), "frozen")
    assert always.estimate == always.high == 1
    assert 0.99998 < always.low < 1
    assert never.estimate == never.low == 0
    assert 0 < never.high < 0.00002
    estimate, low, high = gain(counts(MILLION, MILLION))
    assert estimate == 0
    assert -0.004 < low < 0 < high < 0.004


FLEETS, MEMBERS = 2_000, 20


def ever_harmful_fleets(chance: NDArray[np.float64], liars: int, most_wins: NDArray[np.int64], left_out: int) -> float:
    """Share of simulated fleets that are ever called harmful, with a look after every round of labels.

    Args:
        chance: [C], of a win in each wins-or-losses row of the honest clients.
        liars: further clients, each of whose rows is a loss; they tell all that counts before anybody else.
        most_wins: as in the fixture.
        left_out: clients whose losses a verdict does without.
    """
    rng = np.random.default_rng(7)
    wins = np.cumsum(rng.random((FLEETS, len(chance), WEIGHT)) < chance[:, None], axis=2)
    harmful = np.zeros(FLEETS, bool)
    for look in range(WEIGHT):
        honest = wins[:, :, look]
        losses = np.concatenate((look + 1 - honest, np.full((FLEETS, liars), WEIGHT)), axis=1)
        kept = np.sort(losses, axis=1)[:, : losses.shape[1] - left_out].sum(axis=1)
        favourable = honest.sum(axis=1)
        total = kept + favourable
        harmful |= favourable <= most_wins[np.minimum(total, LABELS)]
        assert total.max() <= LABELS
    return float(harmful.mean())


@pytest.mark.parametrize("liars", [0, CLIENTS - 1])
@pytest.mark.parametrize("chance", ["even", "unlike"])
def test_fleets_without_harm_are_hardly_ever_called_harmful_whatever_fewer_liars_tell_than_have_to_agree(
    liars: int, chance: str, most_wins: NDArray[np.int64]
) -> None:
    chances = np.full(MEMBERS - 2, 0.5) if chance == "even" else np.tile([0.2, 0.8], (MEMBERS - 2) // 2)
    assert ever_harmful_fleets(chances, liars, most_wins, left_out=CLIENTS - 1) <= ALPHA


def test_liars_who_are_not_left_out_break_the_bound_of_the_simulation(most_wins: NDArray[np.int64]) -> None:
    assert ever_harmful_fleets(np.full(MEMBERS - 6, 0.5), CLIENTS - 1, most_wins, left_out=0) > 10 * ALPHA
    assert ever_harmful_fleets(np.full(MEMBERS - 6, 0.5), CLIENTS, most_wins, left_out=CLIENTS - 1) > ALPHA


def test_a_fleet_that_is_harmed_is_found_all_the_same(most_wins: NDArray[np.int64]) -> None:
    assert ever_harmful_fleets(np.full(MEMBERS - 2, 0.25), 0, most_wins, left_out=CLIENTS - 1) > 0.95


small_fleets = st.lists(st.tuples(st.integers(0, WEIGHT), st.integers(0, WEIGHT)), max_size=12)


@given(small_fleets, st.integers(1, 6), st.integers(0, 2**12))
def test_a_verdict_stands_whichever_clients_are_left_out(told: list[tuple[int, int]], needed: int, chosen: int) -> None:
    pooled = Pooled(tuple(counts(*each) for each in told), needed)
    found = pooled.verdict()
    if found == "undecided":
        return
    out = [n for n in range(len(told)) if chosen >> n & 1][: needed - 1]
    assert verdict(sum((counts(*each) for n, each in enumerate(told) if n not in out), Counts())) == found
    speaking = [w > 0 if found == "trusted" else lost > 0 for w, lost in told]
    assert sum(speaking) >= needed


def test_where_one_client_is_enough_the_fleet_is_judged_by_the_sum() -> None:
    for told in ((4, 30), (30, 4), (6, 5), (0, 0)):
        assert Pooled((counts(*told),), needed=1).verdict() == verdict(counts(*told))


@pytest.mark.parametrize(("clients", "expected"), [(4, "undecided"), (5, "harmful")])
def test_a_verdict_needs_as_many_clients_as_have_to_agree(clients: int, expected: str) -> None:
    assert Pooled((counts(0, WEIGHT),) * clients).verdict() == expected
    assert Pooled((counts(WEIGHT, 0),) * clients).verdict() == {"harmful": "trusted"}.get(expected, expected)


def test_no_arm_of_a_portfolio_rests_before_its_client_has_told_all_that_counts_for_the_fleet() -> None:
    assert SETTLED >= WEIGHT
