from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import chain, pairwise
from math import comb

import numpy as np
import pytest

from acclimate_bench.accuracy.measure import LeftOut
from acclimate_bench.accuracy.methods import choose
from acclimate_bench.data.shift import Shift
from acclimate_bench.guard.replay import CHOICES, Run, Streams, Verdicts, recorded_streams, replay, untrue
from acclimate_service.guard.evidence import Counts, verdict

Draw = Callable[..., Streams]


@cache
def capital(favourable: int, contrary: int) -> Fraction:
    """int_0^1 (1 + u)^f (1 - u)^c du, term by term."""
    return sum(
        (
            Fraction((-1) ** j * comb(favourable, i) * comb(contrary, j), i + j + 1)
            for i in range(favourable + 1)
            for j in range(contrary + 1)
        ),
        Fraction(0),
    )


def judged(told: list[tuple[bool, bool]]) -> str:
    """The verdict on rows of which it is known whether the frozen and whether the adapted prediction is right."""
    wins, losses = sum(a and not f for f, a in told), sum(f and not a for f, a in told)
    if capital(losses, wins) >= 20:
        return "harmful"
    return "trusted" if capital(wins, losses) >= 20 else "undecided"


def judged_fleet(told: list[list[tuple[bool, bool]]]) -> str:
    """The verdict on the first 32 rows of each client, four of which are left out on the side that it speaks for."""
    wins = sorted(sum(a and not f for f, a in each[:32]) for each in told)
    losses = sorted(sum(f and not a for f, a in each[:32]) for each in told)
    if capital(sum(losses[:-4]), sum(wins)) >= 20:
        return "harmful"
    return "trusted" if capital(sum(wins[:-4]), sum(losses)) >= 20 else "undecided"


def lags(told: list[list[tuple[bool, bool]]]) -> bool:
    """Whether five clients are not ahead, and the lead is below half its standard deviation."""
    lead = variance = Fraction(0)
    agreeing = 0
    for each in filter(None, told):
        change, differing = sum(a - f for f, a in each[:32]), sum(a != f for f, a in each[:32])
        weight = min(Fraction(1), Fraction(4, differing)) if differing else Fraction(0)
        lead, variance = lead + weight * change, variance + weight**2 * differing
        agreeing += change <= 0
    return agreeing >= 5 and (lead < 0 or 4 * lead**2 < variance)


class Slow:
    """The guard once more, from the list of all labelled rows."""

    def __init__(self, streams: Streams) -> None:
        frozen, adapted = streams.frozen == streams.labels, streams.adapted == streams.labels
        self.rows = [
            [(bool(f), bool(a)) for f, a in zip(*both, strict=True)] for both in zip(frozen, adapted, strict=True)
        ]
        self.told: list[list[tuple[bool, bool]]] = [[] for _ in self.rows]
        self.answers: list[list[bool]] = [[] for _ in self.rows]
        self.verdicts: list[list[tuple[int, str]]] = [[] for _ in self.rows]
        self.fleet: list[tuple[int, str]] = []

    def adapts(self, client: int) -> bool:
        verdicts = judged(self.told[client]), judged_fleet(self.told)
        decided = next((verdict for verdict in verdicts if verdict != "undecided"), None)
        return decided == "trusted" if decided else not lags(self.told)

    def run(self, share: float, seed: int) -> "Slow":
        rng = np.random.default_rng(seed)
        order, labelled = rng.permutation(len(self.rows)), rng.random((len(self.rows), len(self.rows[0]))) < share
        for start in range(0, len(self.rows[0]), 20):
            for client in order:
                batch, adapts = self.rows[client][start : start + 20], self.adapts(client)
                self.answers[client] += [row[adapts] for row in batch]
                self.told[client] += [
                    row for row, is_told in zip(batch, labelled[client, start:], strict=False) if is_told
                ]
                self.verdicts[client].append((len(self.told[client]), judged(self.told[client])))
                self.fleet.append((sum(map(len, self.told)), judged_fleet(self.told)))
        return self


def first(verdicts: list[tuple[int, str]]) -> int | None:
    return next((labelled for labelled, verdict in verdicts if verdict != "undecided"), None)


def alarms(verdicts: list[tuple[int, str]], rows: list[tuple[bool, bool]]) -> int:
    gain = sum(a - f for f, a in rows)
    wrong = {"harmful": gain >= 0, "trusted": gain <= 0, "undecided": False}
    told = ["undecided", *(verdict for _, verdict in verdicts)]
    return sum(after != before and wrong[after] for before, after in pairwise(told))


@pytest.mark.parametrize(("share", "seed"), [(0.05, 0), (0.2, 1), (0.5, 2)])
@pytest.mark.parametrize(("frozen", "adapted"), [(0.7, 0.45), (0.5, 0.7), (0.6, 0.6)])
def test_replays_agree_with_a_slow_loop_over_all_labelled_rows(
    share: float, seed: int, frozen: float, adapted: float, streams: Draw
) -> None:
    drawn = streams(seed, 7, 110, frozen, adapted)
    fast, slow = replay(drawn, share, seed), Slow(drawn).run(share, seed)
    assert fast.hits.tolist() == slow.answers
    assert [each.first for each in fast.clients] == [first(each) for each in slow.verdicts]
    assert [each.false_alarms for each in fast.clients] == list(map(alarms, slow.verdicts, slow.rows))
    assert fast.fleet.first == first(slow.fleet)
    assert fast.fleet.false_alarms == alarms(slow.fleet, [*chain(*slow.rows)])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_what_is_asked_keeps_within_its_budget_and_to_rows_that_differ(share: float, streams: Draw) -> None:
    drawn = streams(0, 20, 200, 0.8, 0.7)
    run = replay(drawn, share, 0, "asked")
    assert np.array_equal(run.hits, replay(drawn, share, 0, "asked").hits)
    if not share:
        assert np.array_equal(run.hits, drawn.adapted_right)
    assert run.labelled.sum() <= share * 20 * 200 + 20
    assert not (run.labelled & (drawn.frozen == drawn.adapted)).any()


def test_as_many_asked_labels_convict_more_clients_than_random_ones(streams: Draw) -> None:
    drawn = streams(1, 40, 200, 0.85, 0.6)
    convicted = {
        choice: sum(each.now == "harmful" for each in replay(drawn, 0.05, 0, choice).clients) for choice in CHOICES
    }
    assert convicted["asked"] > 2 * convicted["random"]


def test_without_a_label_everybody_is_answered_adapted(streams: Draw) -> None:
    drawn = streams(0, 3, 60, 0.9, 0.3)
    run = replay(drawn, 0.0, 0)
    assert np.array_equal(run.hits, drawn.adapted_right)
    assert run.fleet == Verdicts(frozenset({"trusted"}))


def test_harm_that_every_row_shows_ends_with_the_first_labelled_batch(streams: Draw) -> None:
    drawn = streams(0, 8, 60, 1.0, 0.0)
    run = replay(drawn, 1.0, seed=0)
    assert run.hits.sum() == 8 * 60 - 5 * 20  # all but one batch of each of the five who came first
    assert {each.now for each in run.clients} == {"harmful"}


def test_a_run_is_the_same_each_time_and_another_with_another_seed(streams: Draw) -> None:
    drawn = streams(0, 7, 100, 0.6, 0.55)
    assert np.array_equal(replay(drawn, 0.1, 3).hits, replay(drawn, 0.1, 3).hits)
    assert len({replay(drawn, 0.1, seed).hits.tobytes() for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("frozen", "adapted", "wrong"),
    [([1, 0], [1, 1], {"harmful"}), ([1, 1], [0, 1], {"trusted"}), ([1, 0], [0, 1], {"harmful", "trusted"})],
)
def test_a_verdict_is_untrue_unless_all_rows_speak_for_it(
    frozen: list[int], adapted: list[int], wrong: set[str]
) -> None:
    assert untrue(np.array(frozen, bool), np.array(adapted, bool)) == wrong


def test_a_verdict_that_turns_keeps_when_it_was_first_and_counts_each_false_alarm() -> None:
    verdicts = Verdicts(frozenset({"harmful"}))
    for wins, losses in ((0, 1), (0, 10), (0, 12), (12, 12), (12, 40), (60, 40)):
        both = Counts(wins, losses, wins + losses, losses, wins)
        verdicts = verdicts.hear(verdict(both), both.labelled)
    assert (verdicts.first, verdicts.false_alarms, verdicts.now) == (10, 2, "undecided")


def test_predictions_are_made_once_for_each_method_and_those_that_cannot_run_are_named(
    few: Callable[..., Shift],
) -> None:
    told = list[str]()
    shift = few("domain", 0, 1)
    em, atp = recorded_streams(shift, choose(["em", "atp_online"], slow=False), 0, told.append)
    assert isinstance(em, Streams)
    assert isinstance(atp, LeftOut)
    assert told == ["domain frozen"] * 2 + ["domain em"] * 2
    recorded = [round(shift.recorded["em"].accuracy[client] * 200) for client in shift.clients]
    assert em.adapted_right.sum(axis=1).tolist() == recorded
    assert em.frozen_right.sum(axis=1).tolist() == [167, 173]


def test_the_fleet_is_protected_by_the_labels_of_others(few: Callable[..., Shift]) -> None:
    (em,) = recorded_streams(few("domain", *range(6)), choose(["em"], slow=False), 0, lambda _: None)
    assert isinstance(em, Streams)
    runs = list[Run](replay(em, 0.1, seed) for seed in range(5))
    half = np.mean([run.hits[:, 100:].mean() for run in runs])
    assert half > em.frozen_right[:, 100:].mean() - 0.01 > em.adapted_right[:, 100:].mean() + 0.05
