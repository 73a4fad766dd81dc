"""The reduced benchmark that the project carries, and smaller cuttings of it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_bench.accuracy.measure import Result
from acclimate_bench.accuracy.report import Protocol, Report
from acclimate_bench.cli import main
from acclimate_bench.data.shift import Shift
from acclimate_bench.data.shifts import Folders
from acclimate_bench.guard.replay import Streams, replay
from acclimate_bench.guard.report import Guarded, GuardReport

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "benchmarks" / "data" / "fashion"
DIGITS = ROOT / "benchmarks" / "data" / "digits"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def carried() -> Path:
    return CARRIED


@pytest.fixture(scope="session")
def digits() -> Path:
    return DIGITS


@pytest.fixture(scope="session")
def shift() -> Callable[[str], Shift]:
    """A shift of the carried benchmark by name, read once."""
    return cache(Folders(CARRIED, DIGITS).load)


@pytest.fixture(scope="session")
def few(shift: Callable[[str], Shift]) -> Callable[..., Shift]:
    """The same with some of the clients: `few("hybrid", 0, 3)`."""

    def choose(name: str, *rows: int) -> Shift:
        whole, chosen = shift(name), list(rows)
        clients = tuple(whole.clients[row] for row in rows)
        return replace(whole, clients=clients, images=whole.images[chosen], labels=whole.labels[chosen])

    return choose


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A benchmark folder with the label shift alone, two clients of 40 images each; may be damaged."""
    copy = tmp_path / "data"
    shutil.copytree(CARRIED / "label", copy / "label")
    shutil.copy(CARRIED / "accuracy.json", copy)
    with np.load(CARRIED / "label" / "target.npz") as target:
        arrays = {name: target[name][:2] for name in target.files}
    arrays |= {name: arrays[name][:, :40] for name in ("images", "labels")}
    np.savez_compressed(copy / "label" / "target.npz", **arrays)
    return copy


@pytest.fixture
def bench() -> Callable[..., int]:
    """The command line."""
    return lambda *words: main([str(word) for word in words])


@pytest.fixture
def result() -> Callable[..., Result]:
    """A result of two clients of 100 images, with some fields changed."""
    plain = Result(
        method="em",
        adapter="em",
        shift="label",
        options={"steps": 2},
        enrolled=0,
        images=100,
        clients=(2, 7),
        correct=(80, 90),
        frozen=(85, 70),
        reference=None,
    )
    return lambda **changes: replace(plain, **changes)


@pytest.fixture
def report(result: Callable[..., Result]) -> Report:
    """Two shifts, a method with two variants, a chain, a reference, and a method that was given labels."""
    results = [
        result(method=method, adapter=adapter, shift=shift, **changes)
        for shift in ("label", "hybrid")
        for method, adapter, changes in (
            ("none", "none", {"correct": (85, 70), "reference": (0.85, 0.7)}),
            ("bbse_soft", "bbse", {"reference": (0.8, 0.8)}),
            ("bbse_hard", "bbse", {"correct": (60, 60)}),
            ("bn_adapt+em", "bn_adapt+em", {}),
            ("fedthe", "fedthe", {"enrolled": 40}),
        )
    ]
    return Report(Protocol(seed=3, threads=1), tuple(results))


@pytest.fixture
def streams() -> Callable[..., Streams]:
    """Random predictions of 10 classes: `streams(0, clients=4, rows=100, frozen=0.8, adapted=0.6)`."""

    def draw(seed: int, clients: int, rows: int, frozen: float, adapted: float, method: str = "em") -> Streams:
        rng = np.random.default_rng(seed)
        labels = rng.integers(10, size=(clients, rows))

        def right(chance: float) -> np.ndarray:
            other = (labels + rng.integers(1, 10, labels.shape)) % 10
            return np.where(rng.random(labels.shape) < chance, labels, other)

        return Streams("label", method, labels, right(frozen), right(adapted))

    return draw


@pytest.fixture
def guard_report(streams: Callable[..., Streams]) -> GuardReport:
    """A method that helps and one that harms, with two shares of labels, three runs each."""
    found = [streams(1, 4, 100, 0.6, 0.8, "atp_online"), streams(2, 4, 100, 0.8, 0.5, "em")]
    results = [
        Guarded.of(each, share, [replay(each, share, seed) for seed in range(3)])
        for share in (0.05, 0.3)
        for each in found
    ]
    return GuardReport(Protocol(seed=3, threads=1), 3, tuple(results))
