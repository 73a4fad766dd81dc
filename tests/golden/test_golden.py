"""The golden comparisons as tests, one per expected file and precision."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from acclimate_adapters import FrozenModel, Source, create

HERE = Path(__file__).parent
Check = Callable[..., int]


def imported(path: Path) -> ModuleType:
    """A module of no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    """The program as a module."""
    return imported(HERE / "check.py")


@pytest.fixture(scope="module")
def check(checker: ModuleType) -> Check:
    """The command within this process; gives its exit status."""
    return lambda *words: checker.main(list(map(str, words)))


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("file", sorted(path.stem for path in (HERE / "A/expected").glob("*.npz")))
def test_every_recorded_output_is_reproduced(checker: ModuleType, file: str, precision: str) -> None:
    verdicts = list(checker.check_file(HERE / "A", file, precision))
    assert verdicts
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_difference_beyond_its_tolerance_fails(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checker that cannot fail checks nothing: one logit off by 1e-3 in one file."""
    shutil.copytree(HERE / "A", tmp_path / "A", ignore=lambda d, names: [n for n in names if n.startswith("atp")])
    path = tmp_path / "A/expected/none.npz"
    arrays = dict(np.load(path))
    arrays["logits_f64"][1, 2, 3, 4] += 1e-3
    np.savez(path, **arrays)
    for other in (tmp_path / "A/expected").glob("*.npz"):
        if other != path:
            other.unlink()
    assert check(tmp_path / "A") == 1
    assert "FAIL" in capsys.readouterr().out


def test_directory_without_expected_files_is_said_to_be_empty(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path) == 2
    assert "holds no .npz" in capsys.readouterr().err


NETWORK = """
from torch import nn

class Wide(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=3, bias=False), nn.BatchNorm2d(8))
        self.between = nn.BatchNorm1d(8)
        self.top = nn.Linear(8, classes)

    def forward(self, x):
        return self.top(self.between(self.stem(x).relu().mean((2, 3))))
"""


def other_directory(folder: Path) -> Path:
    """A directory with a network that is no row of layers, and what two methods answer on it."""
    (folder / "expected").mkdir()
    (folder / "wide_networks.py").write_text(NETWORK)
    torch.manual_seed(0)
    net = imported(folder / "wide_networks.py").Wide(classes=4).eval()
    description = {"head": "top", "arguments": {"classes": 4}, "input": {"mean": 0.286, "std": 0.353}}
    (folder / "model.json").write_text(json.dumps(description))
    save_file(net.state_dict(), folder / "model.safetensors")
    (folder / "hparams.json").write_text(json.dumps({"tent": {"lr": 1.0}}))
    (folder / "tolerances.json").write_text("{}")
    images = np.load(HERE / "A/stream.npz")["images"][:2, :2, :5]
    np.savez(folder / "stream.npz", images=images)
    for precision in (torch.float64, torch.float32):
        source = Source(prior=torch.full((4,), 0.25))
        model = FrozenModel.from_module(net.to(precision), classifier="top", source=source)
        x = ((torch.from_numpy(images).float() / 255 - 0.286) / 0.353).unsqueeze(3).to(precision)
        for name, adapter in {"none": create("none"), "tent": create("tent", lr=1.0, layers=("stem.1",))}.items():
            answers = []
            for stream in x:
                state = adapter.init(model)
                for batch in stream:
                    step = adapter.step(model, state, batch)
                    answers.append(step.logits.numpy())
                    state = step.state
            key = "logits" if precision is torch.float32 else "logits_f64"
            path = folder / "expected" / f"{name}.npz"
            known = dict(np.load(path)) if path.exists() else {}
            np.savez(path, **known, **{key: np.stack(answers).reshape(2, 2, 5, 4)})
    return folder


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with another network, whose module can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wide_networks", raising=False)
    return other_directory(tmp_path)


def test_any_network_is_checked_and_its_layers_are_found_by_their_kind(wide: Path) -> None:
    command = [sys.executable, str(HERE / "check.py"), str(wide), "--network", "wide_networks:Wide"]
    path = {**os.environ, "PYTHONPATH": str(wide)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {tuple(line.split()[:2]) for line in done.stdout.splitlines() if line.endswith("pass")}
    assert passed == {(file, precision) for file in ("none", "tent") for precision in ("float64", "float32")}
    assert "missing" not in done.stdout


def test_file_that_cannot_be_run_fails_and_the_others_go_on(
    check: Check, wide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(wide / "expected/atp_batch.npz", logits=np.zeros(1), logits_f64=np.zeros(1))  # there are no rates
    (wide / "expected/em.npz").write_bytes(b"cut off")
    assert check(wide, "--network", "wide_networks:Wide") == 1
    out, err = capsys.readouterr()
    verdicts = {tuple(line.split()[:2]): line.split()[-1] for line in out.splitlines()[1:-1]}
    assert [verdicts[name, "float64"] for name in ("atp_batch", "em", "none", "tent")] == [
        "FAIL",
        "FAIL",
        "pass",
        "pass",
    ]
    assert "needs rates" in out
    assert err == ""


@pytest.fixture(autouse=True)
def _single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
