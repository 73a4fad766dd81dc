"""The golden comparisons as tests, one per expected file and precision."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_every_recorded_output_is_reproduced() -> None:
    command = [sys.executable, str(HERE / "check.py"), str(HERE / "A")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {tuple(line.split()[:2]) for line in done.stdout.splitlines() if line.endswith("pass")}
    files = {path.stem for path in (HERE / "A/expected").glob("*.npz")}
    assert passed == {(file, precision) for file in files for precision in ("float64", "float32")}
    assert "missing" not in done.stdout


def test_difference_beyond_its_tolerance_fails(tmp_path: Path) -> None:
    """A checker that cannot fail checks nothing: one logit off by 1e-3 in one file."""
    import shutil

    import numpy as np

    shutil.copytree(HERE / "A", tmp_path / "A", ignore=lambda d, names: [n for n in names if n.startswith("atp")])
    path = tmp_path / "A/expected/none.npz"
    arrays = dict(np.load(path))
    arrays["logits_f64"][1, 2, 3, 4] += 1e-3
    np.savez(path, **arrays)
    for other in (tmp_path / "A/expected").glob("*.npz"):
        if other != path:
            other.unlink()
    done = subprocess.run(
        [sys.executable, str(HERE / "check.py"), str(tmp_path / "A")], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"FAIL" in done.stdout


def test_directory_without_expected_files_is_said_to_be_empty(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(HERE / "check.py"), str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"holds no .npz" in done.stderr


@pytest.fixture(autouse=True)
def _single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
