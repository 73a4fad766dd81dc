"""`acclimate-bench gpu`: what can be run without a card, is."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acclimate_adapters import FrozenModel
from acclimate_bench.cost.gpu import measure
from acclimate_bench.cost.gpu_checks import METHODS, Place, check, differences, full_precision
from acclimate_bench.cost.networks import fashion_cnn
from acclimate_bench.cost.report import Report

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_command_says_so(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("gpu") == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


def test_a_device_that_computes_the_same_passes(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    assert check(report, CPU, batches=2)
    single, double = report.tables.values()
    assert [row["name"] for row in single] == [row["name"] for row in double] == [*METHODS]
    assert all(row["target"].endswith("met") for row in (*single, *double))


def test_a_difference_is_seen() -> None:
    exact, rounded = Place(CPU, torch.float64).model(), Place(CPU).model()
    assert 0 < max(differences("atp", exact, rounded, 2)) < 1e-5
    network = fashion_cnn("cpu")
    source = replace(network.model.source, rates={"bn1.running_mean": 0.5})
    wrong = FrozenModel.from_module(network.net, classifier=network.model.classifier, source=source)
    assert max(differences("atp", exact, wrong, 2)) > 1e-3


def test_full_precision_is_for_the_block_alone() -> None:
    products = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [each.fp32_precision for each in products]
    with full_precision():
        assert [each.fp32_precision for each in products] == ["ieee", "ieee"]
    assert [each.fp32_precision for each in products] == before


@pytest.mark.slow
def test_all_that_is_measured_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, network = Report(), fashion_cnn("cpu")
    before = {name: tensor.clone() for name, tensor in network.net.state_dict().items()}
    measure(report, network, repeats=1)
    report.finish(tmp_path / "gpu.json")
    tables = json.loads((tmp_path / "gpu.json").read_bytes())
    assert len(tables) == 5
    names = [row["name"] for rows in tables.values() for row in rows]
    assert {"atp online, plain", "none, plain"} <= set(names)
    torch.testing.assert_close(dict(network.net.state_dict()), before, rtol=0, atol=0)


def test_a_place_without_a_card_has_no_graphs() -> None:
    assert not Place(CPU, replays=True).model().graphs.active
