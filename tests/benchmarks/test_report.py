import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from acclimate_bench.accuracy.measure import LeftOut, Result
from acclimate_bench.accuracy.report import Report, figures, from_json, merge, to_json, to_text
from acclimate_bench.errors import BenchError


def test_figures_of_two_clients_by_hand(result: Callable[..., Result]) -> None:
    f = figures(result(correct=(80, 90), frozen=(85, 70), reference=(0.81, 0.9)))
    assert (f.mean, f.gain, f.worst, f.loss, f.harmed) == (85.0, 7.5, 80.0, -5.0, 1)
    assert f.gap == pytest.approx(-0.5)


def test_a_client_that_loses_two_points_is_not_yet_harmed(result: Callable[..., Result]) -> None:
    assert figures(result(correct=(83, 70))).harmed == 0
    assert figures(result(correct=(82, 70))).harmed == 1


def test_where_everybody_gains_the_largest_loss_is_zero(result: Callable[..., Result]) -> None:
    assert figures(result(correct=(90, 90))).loss == 0.0


def test_without_a_reference_there_is_no_gap(result: Callable[..., Result]) -> None:
    assert figures(result(reference=None)).gap is None


def test_tables_come_with_their_protocol_and_number_of_images(report: Report) -> None:
    text = to_text(report)
    assert text.startswith("Top-1 accuracy in %")
    assert "batches of 20 in stored order; state reset before every client; seed 3; 1 thread" in text
    row = next(line for line in text.splitlines() if line.startswith("| bbse_soft") and "2 x 100" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "bbse_soft", "2 x 100", "85.00", "+7.50", "+5.00", "80.0", "-5.0", "1",
    ]  # fmt: skip


def test_ties_are_rounded_away_from_zero_and_no_zero_is_negative(result: Callable[..., Result], report: Report) -> None:
    up = result(clients=(0,), images=800, correct=(5,), frozen=(0,))
    down = replace(up, shift="hybrid", correct=(0,), frozen=(5,))
    same = replace(up, shift="feature", correct=(5,), frozen=(5,))
    text = to_text(replace(report, results=(up, down, same)))
    assert "| em     | +0.63 |  -0.63 |   +0.00 |" in text


def test_harm_of_all_shifts_stands_side_by_side_and_a_dash_where_nothing_was_measured(report: Report) -> None:
    partly = report.only(lambda r: (r.method, r.shift) != ("bbse_hard", "hybrid"))
    harm = to_text(partly).split("## Harm")[1].split("###")[0]
    row = next(line for line in harm.splitlines() if line.startswith("| bbse_hard"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["bbse_hard", "-25.0 / 2", "-"]


def test_the_columns_of_a_table_line_up(report: Report) -> None:
    lines = to_text(report).split("### label\n\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 6
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1


def test_methods_that_were_given_labels_stand_apart(report: Report) -> None:
    before, after = to_text(report).split("## With 40 labelled images of each client")
    assert "fedthe" not in before
    assert "| fedthe" in after
    assert "em" in before


def test_what_was_left_out_is_said_with_the_reason(report: Report) -> None:
    text = to_text(replace(report, left_out=(LeftOut("memo", "label", "it is too slow"),)))
    assert "- `memo` on label: it is too slow." in text


def test_what_was_left_out_for_the_same_reason_stands_together(report: Report) -> None:
    entries = [LeftOut(method, shift, "no rates") for shift in ("a", "b") for method in ("atp", "dynfed")]
    text = to_text(replace(report, left_out=(*entries, LeftOut("memo", "a", "no rates"))))
    assert text.endswith("## Left out\n\n- `atp`, `dynfed` on a, b: no rates.\n- `memo` on a: no rates.\n")


def test_json_comes_back_as_it_was_written(report: Report, tmp_path: Path) -> None:
    report = replace(report, left_out=(LeftOut("memo", "label", "it is too slow"),))
    (tmp_path / "run.json").write_text(to_json(report))
    assert from_json(tmp_path / "run.json") == report


def test_json_holds_the_figures_for_other_programs(report: Report) -> None:
    entry = json.loads(to_json(report))["results"][1]
    assert (entry["method"], entry["figures"]["gain"]) == ("bbse_soft", 7.5)


@pytest.mark.parametrize("content", ["", "{}", '{"protocol": {}, "results": []}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(BenchError, match=r"run.json is not what --json"):
        from_json(tmp_path / "run.json")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="absent"):
        from_json(tmp_path / "absent.json")


def test_runs_of_one_protocol_become_one(report: Report) -> None:
    one, other = (report.only(lambda r, s=s: r.shift == s) for s in report.shifts)
    assert merge([one, other]) == report


def test_runs_of_different_protocols_are_not_mixed(report: Report) -> None:
    other = replace(report, protocol=replace(report.protocol, seed=4))
    with pytest.raises(BenchError, match=r"protocols differ: .*seed 3.*seed 4"):
        merge([report, other])
