"""The service as it is run: `acclimate serve` in a process of its own, with nothing but variables to set it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from acclimate_adapters import create, guarded_step
from acclimate_store import Catalogue

sys.path.insert(0, str(Path(__file__).parent))  # where the tests find `exactly_once` and `hostile`

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"
SERVE = (Path(sys.executable).with_name("acclimate"), "serve")
Images = NDArray[np.uint8]


class Process:
    """A running `acclimate serve`."""

    def __init__(self, environment: dict[str, str], log: Path, command: Sequence[str | Path] = SERVE) -> None:
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdout is not None
        self.announcement = self._process.stdout.readline()
        if " at http://" not in self.announcement:
            self.close()
            pytest.fail(f"the service did not start: {log.read_text()}")
        self.adapters = self._process.stdout.readline()
        self.url = self.announcement.partition(" at ")[2].partition(",")[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What it printed since the adapters, once it has ended."""
        return self._process.stdout.read()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(timeout=30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self.running:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def variables(**settings: Any) -> dict[str, str]:
    """Of the service, by names without their prefix, beside what all tests have in common."""
    common = {"model_store": BUNDLES, "port": 0, "threads": 1, "state_budget": 1}
    return {f"ACCLIMATE_{name.upper()}": str(value) for name, value in {**common, **settings}.items()}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start the service; `settings` are variables without their prefix. Each start uses the same data directory.

    `command` is another program that serves, instead of `acclimate serve`.

    States are stored exactly: answers are compared with those of uninterrupted runs, digit by digit.
    """
    processes: list[Process] = []

    def start(*, command: Sequence[str | Path] = SERVE, **settings: Any) -> Process:
        environment = variables(**{"data_dir": tmp_path / "data", **settings})
        processes.append(Process(environment, tmp_path / "stderr.log", command))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def serial() -> Callable[..., list[NDArray[np.float64]]]:
    """Probabilities of an uninterrupted run in this process."""
    bundle = Catalogue(BUNDLES).load("fashion-cnn")

    def run(batches: list[Images], adapter: str = "atp") -> list[NDArray[np.float64]]:
        method = create(adapter)
        state, answers = method.init(bundle.model), []
        for images in batches:
            step = guarded_step(method, bundle.model, state, bundle.prepare(images))
            state = step.state
            answers.append(step.logits.double().softmax(dim=-1).numpy())
        return answers

    return run


@pytest.fixture(scope="session")
def balanced(program: Callable[[str], str]) -> None:
    """The test needs nginx, which is no Python package."""
    program("nginx")
