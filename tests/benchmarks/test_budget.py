import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_adapters import create
from acclimate_bench.accuracy.measure import predict
from acclimate_bench.budget.command import FROZEN, Portion, measure, report_targets, to_text

Command = Callable[..., int]


def test_few_bytes_cost_next_to_nothing_and_hardly_any_cost_something(few) -> None:  # type: ignore[no-untyped-def]
    told: list[str] = []
    exact, eighth, crumbs = measure(few("hybrid", 0, 3), (0.125, 0.005), told.append)
    assert (exact.budget, exact.lost, exact.changed, exact.clients) == (1.0, 0.0, 0.0, 2)
    assert 0.1 < eighth.nbytes / exact.nbytes < 0.135
    assert eighth.changed <= 1
    assert crumbs.nbytes < 5000
    assert crumbs.changed > eighth.changed
    assert crumbs.lost == pytest.approx(exact.accuracy - crumbs.accuracy)
    assert told == ["hybrid 1"] * 2 + ["hybrid 0.125"] * 2 + ["hybrid 0.005"] * 2


def test_the_frozen_network_shows_what_there_is_to_lose(few) -> None:  # type: ignore[no-untyped-def]
    shift = few("hybrid", 0, 3)
    exact, frozen = measure(shift, (FROZEN,), lambda _: None)
    adapted, plain = ([predict(create(name), shift.model, shift.x(row)) for row in (0, 1)] for name in ("atp", "none"))
    other = [float((a != p).float().mean()) for a, p in zip(adapted, plain, strict=True)]
    assert frozen.nbytes == 0
    assert frozen.changed == pytest.approx(50 * sum(other))
    assert frozen.changed > 5
    assert frozen.lost == pytest.approx(exact.accuracy - frozen.accuracy)


def portions(nbytes: float, lost: float, budget: float = 0.125) -> list[Portion]:
    return [
        *(Portion(shift, 1.0, 8, 1000, 80.0, 0.0, 0.0) for shift in ("feature", "label")),
        *(Portion(shift, budget, 8, nbytes, 80.0 - lost, lost, 1.0) for shift in ("feature", "label")),
    ]


@pytest.mark.parametrize(
    ("nbytes", "lost", "share", "points"),
    [(250, 0.1, "<= 25 met", "<= 0.1 met"), (251, 0.11, "<= 25 MISSED", "<= 0.1 MISSED")],
)
def test_the_default_budget_is_held_against_its_targets(
    nbytes: float, lost: float, share: str, points: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report_targets(portions(nbytes, lost))
    *_, of_exact, of_accuracy = capsys.readouterr().out.splitlines()
    assert of_exact.endswith(share)
    assert of_accuracy.endswith(points)


def test_other_budgets_have_no_targets(capsys: pytest.CaptureFixture[str]) -> None:
    report_targets(portions(600, 3.0, budget=0.5))
    assert capsys.readouterr().out == ""


def test_the_table_has_a_row_for_each_budget_and_a_column_for_each_shift() -> None:
    portions = [
        *(Portion(shift, 1.0, 40, 378_000, 80.0, 0.0, 0.0) for shift in ("feature", "label")),
        Portion("feature", 0.5, 40, 189_000, 79.9, 0.1, 0.5),
        Portion("label", 0.5, 40, 189_000, 80.3, -0.3, 0.7),
    ]
    heading, _, exact, half = (line.split("|")[1:-1] for line in to_text(portions).splitlines())
    assert [cell.strip() for cell in heading][-3:] == ["feature", "label", "other predictions"]
    assert [cell.strip() for cell in exact] == ["1", "378,000", "100.0 %", "80.00", *["+0.00"] * 3, "0.00 %"]
    assert [cell.strip() for cell in half] == ["0.5", "189,000", "50.0 %", "80.10", "+0.10", "-0.10", "+0.30", "0.60 %"]


def test_the_command_prints_writes_and_draws(
    bench: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = ("--json", tmp_path / "new" / "budget.json", "--plot", tmp_path / "new" / "budget.svg")
    assert bench("budget", "--data", folder, "--shifts", "label", "--budgets", 0.25, *outputs) == 0
    printed = capsys.readouterr().out
    assert "| 0.25 " in printed
    assert "| frozen " in printed
    budgets = [entry["budget"] for entry in json.loads((tmp_path / "new" / "budget.json").read_bytes())]
    assert budgets == [1.0, 0.25, FROZEN]
    assert "points of accuracy" in (tmp_path / "new" / "budget.svg").read_text()


@pytest.mark.parametrize("share", ["0", "1", "2", "x"])
def test_a_budget_that_is_no_share_is_refused(bench: Command, share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("budget", "--budgets", share)
    assert "use a share between 0 and 1" in capsys.readouterr().err
