from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from acclimate_adapters import ADAPTERS
from acclimate_bench.accuracy.measure import LeftOut, Result, count_clients, measure, part_of
from acclimate_bench.accuracy.methods import METHODS, choose
from acclimate_bench.data.digits import DIGITS
from acclimate_bench.data.fashion import FASHION
from acclimate_bench.data.shift import SUBSET, Shift
from acclimate_bench.errors import BenchError

FORWARD = ("none", "bn_adapt", "em", "bbse_soft", "bbse_hard", "t3a")

CONSENSUS = (
    ("feature", 1.12, 0.0),
    ("label", 0.0, -1.0),
    ("hybrid", 1.62, 0.0),
    ("multitype", 0.62, -0.5),
    ("domain", 4.65, 2.5),
    ("domain_label", 2.55, -1.0),
)
"""Mean gain and that of the client that fares worst, in points: from five members that ran by themselves."""


def results(shift: Shift, *names: str, seed: int = 0) -> list[Result]:
    found = list(measure(shift, choose(names, slow=True), seed, lambda _: None))
    assert all(isinstance(entry, Result) for entry in found), found
    return [entry for entry in found if isinstance(entry, Result)]


def flips(result: Result) -> list[int]:
    """By client: predictions by which the number of right ones differs from the recorded one."""
    assert result.reference is not None
    recorded = (round(accuracy * result.images) for accuracy in result.reference)
    return [abs(got - want) for got, want in zip(result.correct, recorded, strict=True)]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("feature", (0, 2, 4, 6)),
        ("label", (1, 3, 5, 7)),
        ("hybrid", (0, 3, 5, 6)),
        pytest.param("hybrid", (1, 2, 4, 7), marks=pytest.mark.slow),
        ("multitype", (0, 1, 2, 5)),
    ],
)
def test_methods_without_gradients_reach_the_recorded_accuracy_of_every_client(
    name: str, rows: Sequence[int], few: Callable[..., Shift]
) -> None:
    for result in results(few(name, *rows), *FORWARD):
        assert len(result.clients) == len(rows)
        assert max(flips(result)) <= 1, (result.method, flips(result))


@pytest.mark.parametrize("name", FASHION)
def test_atp_reaches_the_recorded_accuracy_of_every_client(name: str, few: Callable[..., Shift]) -> None:
    for result in results(few(name, 1, 4, 6), "atp_batch", "atp_online"):
        assert max(flips(result)) <= 1, (result.method, flips(result))


@pytest.mark.parametrize(
    ("name", "rows"), [("feature", (0, 5)), ("label", (3, 7)), ("hybrid", (2, 6)), ("multitype", (1, 4))]
)
def test_balanced_reaches_the_accuracy_of_its_reference_on_every_client(
    name: str, rows: Sequence[int], few: Callable[..., Shift]
) -> None:
    (balanced,) = results(few(name, *rows), "balanced")
    assert max(flips(balanced)) <= 2, flips(balanced)
    assert balanced.correct != balanced.frozen


@pytest.mark.slow  # every client of every shift
@pytest.mark.parametrize(("name", "gain", "worst"), CONSENSUS)
def test_consensus_gains_and_harms_nobody_much(
    name: str, gain: float, worst: float, shift: Callable[[str], Shift]
) -> None:
    (consensus,) = results(shift(name), "consensus")
    gains = (np.array(consensus.correct) - consensus.frozen) / consensus.images * 100
    assert gains.mean() == pytest.approx(gain, abs=0.2)
    assert gains.min() == pytest.approx(worst, abs=0.5)


@pytest.mark.parametrize("name", DIGITS)
def test_the_recorded_accuracies_of_the_digits_are_reached_by_every_client(
    name: str, few: Callable[..., Shift]
) -> None:
    none, bn_adapt, em = results(few(name, 1, 4, 8), "none", "bn_adapt", "em")
    assert max(flips(none) + flips(bn_adapt) + flips(em)) <= 1
    assert len({none.correct, bn_adapt.correct, em.correct}) == 3


def test_on_the_digits_em_harms_every_client_where_classes_are_even(few: Callable[..., Shift]) -> None:
    (em,) = results(few("domain", 0, 3, 6), "em")
    assert all(after < before - 4 for after, before in zip(em.correct, em.frozen, strict=True))


def test_what_was_not_measured_at_the_source_of_the_digits_keeps_methods_out(few: Callable[..., Shift]) -> None:
    left_out = list(measure(few("domain", 0), choose(["atp_online", "surgical"], slow=False), 0, lambda _: None))
    assert left_out == [
        LeftOut("surgical", "domain", "no hyper-parameters of 'surgical' were recorded"),
        LeftOut("atp_online", "domain", "it needs rates, which the data of this shift do not hold"),
    ]


def test_a_client_fares_the_same_whoever_came_before(few: Callable[..., Shift]) -> None:
    (forwards,), (backwards,) = results(few("hybrid", 0, 5), "t3a"), results(few("hybrid", 5, 0), "t3a")
    assert forwards.clients == backwards.clients[::-1]
    assert forwards.correct == backwards.correct[::-1]


def test_the_frozen_model_gains_nothing_over_itself(few: Callable[..., Shift]) -> None:
    (none,) = results(few("label", 0, 1), "none")
    assert none.correct == none.frozen


def test_a_slow_method_answers_the_recorded_subset_only(shift: Callable[[str], Shift]) -> None:
    (memo,), hybrid = choose(["memo"], slow=True), shift("hybrid")
    part = part_of(memo, hybrid)
    assert [hybrid.clients[row] for row in part.rows] == [12, 32]
    assert part.last - part.first == hybrid.recorded[SUBSET].images == 100


def test_memo_stays_near_its_recorded_accuracy_though_its_views_are_drawn_otherwise(few: Callable[..., Shift]) -> None:
    (memo,) = results(few("label", 1), "memo")
    assert memo.images == 60
    assert max(flips(memo)) <= 6


def test_a_slow_method_is_left_out_where_it_has_no_client(few: Callable[..., Shift]) -> None:
    (memo,) = measure(few("label", 0), choose(["memo"], slow=True), 0, lambda _: None)
    assert isinstance(memo, LeftOut)
    assert "recorded subset" in memo.reason


def test_fed_ade_runs_where_there_are_anchors_and_is_left_out_elsewhere(few: Callable[..., Shift]) -> None:
    (measured,) = results(few("hybrid", 0), "fed_ade")
    assert measured.images == 200
    (left_out,) = measure(few("feature", 0), choose(["fed_ade"], slow=False), 0, lambda _: None)
    assert left_out == LeftOut("fed_ade", "feature", "it needs anchors, which the data of this shift do not hold")


def test_a_method_without_recorded_hyper_parameters_is_left_out(few: Callable[..., Shift]) -> None:
    unknown = replace(few("label", 0), hparams={})
    (left_out,) = measure(unknown, choose(["tent"], slow=False), 0, lambda _: None)
    assert isinstance(left_out, LeftOut)
    assert "'tent'" in left_out.reason


def test_labelled_images_are_not_answered_and_the_frozen_model_meets_the_same_ones(few: Callable[..., Shift]) -> None:
    shift = few("hybrid", 0)
    (fedthe,) = results(shift, "fedthe")
    later = replace(shift, images=shift.images[:, 40:], labels=shift.labels[:, 40:])
    (none,) = results(later, "none")
    assert (fedthe.enrolled, fedthe.images) == (40, 160)
    assert fedthe.frozen == none.correct


def test_progress_is_told_of_every_client(few: Callable[..., Shift]) -> None:
    shift, methods, told = few("label", 0, 2), choose(["none", "em", "fed_ade"], slow=False), list[str]()
    list(measure(shift, methods, 0, told.append))
    assert told == ["label frozen"] * 2 + ["label none"] * 2 + ["label em"] * 2
    assert count_clients(shift, methods) == len(told)


def test_the_seed_reaches_those_who_draw_random_numbers_and_nobody_else(shift: Callable[[str], Shift]) -> None:
    recorded = shift("hybrid").hparams
    seeded = {m.name for m in METHODS if m.hyperparameters(recorded, seed=5).get("seed") == 5}
    assert {"dynfed_mlp", "memo", "fed_ade", "fedthe"} <= seeded
    assert not {"none", "em", "atp_online", "atp+em"} & seeded


def test_every_adapter_is_measured() -> None:
    assert {part for method in METHODS for part in method.adapter.split("+")} == set(ADAPTERS) - {
        "portfolio"
    }  # needs labels


def test_slow_methods_run_when_asked_for_or_named() -> None:
    assert "memo" not in [method.name for method in choose([], slow=False)]
    assert "memo" in [method.name for method in choose([], slow=True)]
    assert [method.name for method in choose(["memo", "em"], slow=False)] == ["em", "memo"]


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match="no method foo; there are none, bn_adapt"):
        choose(["em", "foo"], slow=False)


def test_the_wrong_answers_of_another_client_would_be_noticed(few: Callable[..., Shift]) -> None:
    mixed_up = few("hybrid", 0, 1)
    (result,) = results(replace(mixed_up, labels=np.ascontiguousarray(mixed_up.labels[::-1])), "none")
    assert min(flips(result)) > 20
