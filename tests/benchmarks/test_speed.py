"""The benchmark of steps: floor and steps in one table, each with its ratio."""

import json
from pathlib import Path

import pytest

from acclimate_bench.cost.networks import fashion_cnn
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.speed import GRADIENT, compare, forward_backward_forward, gradient_rows


def test_a_table_compares_steps_with_their_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, report = fashion_cnn("cpu"), Report()
    compare(report, network, 3, GRADIENT, forward_backward_forward(network), gradient_rows(network, 1e-9))
    report.finish(tmp_path / "speed.json")
    ((title, rows),) = json.loads((tmp_path / "speed.json").read_text()).items()
    assert title.startswith("fashion-cnn, 20 x 1 x 28 x 28, over forward + backward + forward: cpu")
    floor, step = rows
    assert (floor["name"], step["name"]) == (GRADIENT, "atp online")
    assert step["ratio"] == pytest.approx(step["p50"] / floor["p50"])
    assert step["p5"] <= step["p50"] <= step["p95"]
    assert step["target"] == "<= 1e-09 MISSED"
    assert "atp online" in capsys.readouterr().out
