import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from acclimate_bench.accuracy.measure import LeftOut
from acclimate_bench.accuracy.report import Protocol
from acclimate_bench.errors import BenchError
from acclimate_bench.guard.plot import draw_guard, draw_spent
from acclimate_bench.guard.replay import Run, Streams, Verdicts
from acclimate_bench.guard.report import Afterwards, Guarded, GuardReport, Outcome, from_json, harm, merge, to_json
from acclimate_bench.guard.text import to_text

Command = Callable[..., int]


def runs(*accuracies: float, share: float = 0.05) -> Guarded:
    """Runs with these accuracies, where the frozen model has 80 % and the adapted one 84 %."""
    outcomes = tuple(Outcome(each, 5.0, -3.0, 1, 40, 0, (None, 9), 1) for each in accuracies)
    return Guarded("label", "em", share, 2, 200, 80.0, 84.0, -5.0, 1, outcomes)


def cells(text: str, start: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if line.startswith(start))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_run_in_numbers_by_hand() -> None:
    labels = np.zeros((2, 100), int)
    frozen, adapted = labels.copy(), labels.copy()
    frozen[0, 50:60] = 1  # 10 wrong in the second half
    adapted[1, :4] = 1  # 4 wrong in the first
    labelled = np.zeros((2, 100), bool)
    labelled[0, :5] = True
    streams = Streams("label", "em", labels, frozen, adapted)
    decided = Verdicts(frozenset({"harmful"}), "harmful", first=7, false_alarms=2)
    result = Guarded.of(
        streams, 0.1, [Run(adapted == labels, labelled, Verdicts(frozenset()), (Verdicts(frozenset()), decided))]
    )
    assert (result.frozen, result.adapted, result.guarded) == (90.0, 100.0, 100.0)
    assert (result.adapted_loss, result.adapted_harmed) == (-4.0, 1)
    assert result.outcomes == (Outcome(100.0, 2.5, -4.0, 1, None, 0, (None, 7), 1),)


def test_what_is_drawn_of_labels_and_harm_is_the_share_of_all_clients_and_rows(tmp_path: Path) -> None:
    few, many = runs(81.0, 82.0), replace(runs(83.0), shift="hybrid", clients=6, images=100)
    many = replace(many, outcomes=(replace(many.outcomes[0], labelled=1.0, harmed=3),))
    report = GuardReport(Protocol(seed=0, threads=1), 2, (few, many, replace(few, choice="asked")))
    assert report.harmed(0.05, "random") == 100 * (1 + 3) / (2 + 6)
    assert report.labelled(0.05, "random") == (400 * 5.0 + 600 * 1.0) / 1000
    text = draw_spent(report, tmp_path / "spent").read_text()
    assert all(f">{words}<" in text for words in ("random rows", "asked rows", "rows labelled, %"))


def test_what_is_best_is_known_afterwards_by_client() -> None:
    labels = np.zeros((2, 100), int)
    wrong = [np.zeros((2, 100), int) for _ in range(3)]
    wrong[0][:, 50:60] = 1  # the frozen model has 80 % of each client's second half
    wrong[1][0, 50:75] = 1  # 50 % and 100 %
    wrong[2][1, 50:70] = 1  # 100 % and 60 %
    some = Streams("label", "slow", labels[:1, :50], *[wrong[0][:1, :50]] * 2)
    streams = [
        some,
        *(Streams("label", name, labels, wrong[0], of) for name, of in (("em", wrong[1]), ("t3a", wrong[2]))),
    ]
    assert Afterwards.of(streams) == Afterwards("label", 80.0, "t3a", 80.0, 100.0)
    report = GuardReport(Protocol(seed=0, threads=1), 2, (runs(84.0),), afterwards=(Afterwards.of(streams),))
    assert cells(to_text(report), "| label ")[0] == ["label", "t3a", "80.0", "80.0", "100.0"]
    assert merge([report, report]).afterwards == report.afterwards * 2


def test_two_points_are_not_yet_harm() -> None:
    frozen = np.ones((2, 100), bool)
    hits = frozen.copy()
    hits[0, :2] = hits[1, :3] = False
    assert harm(hits, frozen) == (-3.0, 1)


@pytest.mark.parametrize(
    ("accuracies", "share", "met", "kept"),
    [
        ((82.0, 82.0), 0.05, True, [True, True]),
        ((81.5, 84.0), 0.05, True, [False, True]),
        ((81.9, 82.0), 0.05, False, [False, True]),
        ((82.9, 83.0), 0.1, False, [False, True]),
    ],
)
def test_the_bar_against_the_better_one_depends_on_the_share_of_labels(
    accuracies: tuple[float, ...], share: float, met: bool, kept: list[bool]
) -> None:
    result = runs(*accuracies, share=share)
    assert result.better_met == met
    assert result.keeps_better is not None
    assert result.keeps_better.tolist() == kept


def test_nothing_is_asked_against_the_better_one_for_other_shares() -> None:
    result = runs(50.0, share=0.01)
    assert result.better_met
    assert result.keeps_better is None


def test_the_bar_against_frozen_is_looked_at_in_every_run_and_in_their_mean() -> None:
    assert runs(79.0, 78.9, 90.0, share=0.01).keeps_frozen.tolist() == [True, False, True]
    assert runs(79.0, 78.9, 90.0).frozen_met
    assert not runs(79.0, 78.9).frozen_met


def test_misses_are_named_with_their_size(guard_report: GuardReport) -> None:
    missed = replace(guard_report, results=(runs(81.0, 78.5), replace(runs(84.0, 84.0), method="tent")))
    text = to_text(missed)
    assert (
        "At most 2 points under the better one, in the mean of the runs: 1 of 2; missed by `em` on label (-4.3)."
        in text
    )
    assert "At most 1 point under frozen, in the mean of the runs: 2 of 2." in text
    assert "At most 1 point under frozen, in each of 2 runs: 1 of 2; missed by `em` on label (-1.5) in 1." in text


def test_where_nothing_is_missed_nothing_is_named(guard_report: GuardReport) -> None:
    text = to_text(replace(guard_report, results=(runs(84.0),)))
    assert "in the mean of the runs: 1 of 1.\n" in text
    assert "in each of 1 runs: 1 of 1.\n" in text


def test_the_tables_hold_accuracies_harm_and_verdicts(guard_report: GuardReport) -> None:
    report = replace(guard_report, results=(runs(83.0, 78.5),), runs=2)
    accuracy, verdicts = cells(to_text(report), "| label")
    assert accuracy == ["label", "em", "80.0", "84.0", "80.8", "-3.3", "+0.8", "-1.5", "1 / 1"]
    assert verdicts == ["label", "em", "-5.0", "-3.0", "1", "1.0", "40 (100 %)", "9 (50 %)", "0 / 2", "2 / 4"]


def test_a_method_that_could_not_run_has_dashes_and_a_reason(guard_report: GuardReport) -> None:
    results = (runs(83.0), replace(runs(83.0), shift="domain"), replace(runs(83.0), method="atp_online"))
    text = to_text(
        replace(guard_report, results=results, left_out=(LeftOut("atp_online", "domain", "it needs rates"),))
    )
    dashed = [row for row in cells(text, "| domain") if row[1] == "atp_online"]
    assert [set(row[2:]) for row in dashed] == [{"-"}, {"-"}]
    assert "- `atp_online` on domain: it needs rates." in text


def test_each_share_of_labels_has_its_section(guard_report: GuardReport) -> None:
    text = to_text(guard_report)
    assert text.index("## 5 % of rows labelled") < text.index("## 30 % of rows labelled")
    assert "3 runs with other rows labelled" in text


def test_a_guard_report_comes_back_as_it_was_written(guard_report: GuardReport, tmp_path: Path) -> None:
    report = replace(guard_report, left_out=(LeftOut("atp_online", "domain", "it needs rates"),))
    (tmp_path / "run.json").write_text(to_json(report))
    assert from_json(tmp_path / "run.json") == report


def test_a_report_of_another_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"protocol": {}, "results": []}')
    with pytest.raises(BenchError, match=r"run.json is not what --json"):
        from_json(tmp_path / "run.json")


def test_guard_runs_of_one_protocol_become_one_and_others_are_refused(guard_report: GuardReport) -> None:
    one, other = (replace(guard_report, results=guard_report.results[part]) for part in (slice(2), slice(2, 4)))
    assert merge([one, other]) == guard_report
    with pytest.raises(BenchError, match=r"protocols differ: .*3 runs.*9 runs"):
        merge([one, replace(other, runs=9)])


def test_the_guard_is_drawn_as_png_and_svg_with_every_share(guard_report: GuardReport, tmp_path: Path) -> None:
    png, svg = draw_guard(guard_report, tmp_path / "guard")
    with Image.open(png) as image:
        assert image.format == "PNG"
    texts = {(each.text or "").strip() for each in ElementTree.parse(svg).iter() if each.tag.endswith("text")}
    assert {"label", "em", "atp_online", "guarded, 5 % of rows labelled", "guarded, 30 % of rows labelled"} <= texts
    first = svg.read_bytes()
    assert draw_guard(guard_report, tmp_path / "guard")[1].read_bytes() == first


def test_a_guard_report_without_results_is_refused(guard_report: GuardReport, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing to draw"):
        draw_guard(replace(guard_report, results=()), tmp_path / "guard")


def test_the_command_measures_shows_and_shows_again(
    bench: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    words = ("--data", folder, "--shifts", "label", "--methods", "em", "--labels", 0.5, 0.1, "--seeds", 2)
    assert bench("guard", *words, "--json", out / "run.json", "--plot", out / "guard") == 0
    printed = capsys.readouterr().out
    assert [row[:2] for row in cells(printed, "| label")] == [["label", "em"]] * 5
    assert {path.name for path in out.iterdir()} == {"run.json", "guard.png", "guard.svg"}
    entries = json.loads((out / "run.json").read_bytes())["results"]
    assert [(entry["share"], entry["clients"], len(entry["outcomes"])) for entry in entries] == [
        (0.1, 2, 2),
        (0.5, 2, 2),
    ]
    assert bench("guard", "--from", out / "run.json") == 0
    assert capsys.readouterr().out == printed


def test_the_command_says_before_it_measures_that_data_are_missing(
    bench: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("guard", "--digits", tmp_path, "--shifts", "domain") == 2
    assert "is no benchmark folder" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--labels", "-0.1"), ("--labels", "1.5"), ("--labels", "x"), ("--seeds", "0")])
def test_other_shares_and_numbers_are_refused(
    words: tuple[str, ...], bench: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench("guard", *words)
    assert words[0] in capsys.readouterr().err
