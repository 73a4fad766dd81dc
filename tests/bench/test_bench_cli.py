import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_service.bench.errors import BenchError

Command = Callable[..., int]


def test_a_run_prints_tables_and_writes_what_was_asked_for(
    acclimate: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    words = ("--data", folder, "--shifts", "label", "--methods", "em", "none", "--seed", 4)
    outputs = ("--json", out / "run.json", "--plot", out / "gains", "--images", out / "images")
    assert acclimate("bench", "accuracy", *words, *outputs) == 0
    printed = capsys.readouterr().out
    assert "seed 4" in printed
    assert "| em " in printed
    assert "2 x 40" in printed
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {"run.json", "gains.png", "gains.svg", "images/em.svg"}
    assert [entry["method"] for entry in json.loads((out / "run.json").read_bytes())["results"]] == ["none", "em"]


def test_an_earlier_run_is_shown_without_any_data(
    acclimate: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    acclimate("bench", "accuracy", "--data", folder, "--shifts", "label", "--methods", "bn_adapt", "--json", run)
    printed = capsys.readouterr().out
    assert acclimate("bench", "accuracy", "--data", tmp_path / "absent", "--from", run) == 0
    assert capsys.readouterr().out == printed


def test_a_wrong_path_is_refused(acclimate: Command, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="is no benchmark folder"):
        acclimate("bench", "accuracy", "--data", tmp_path)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    acclimate: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="cannot write there"):
        acclimate("bench", "accuracy", "--data", tmp_path, "--json", tmp_path / "file" / "run.json")
    assert capsys.readouterr().out == ""


def test_without_its_extra_the_command_says_what_to_install(
    acclimate: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    with pytest.raises(BenchError, match=r"needs tqdm: pip install 'acclimate\[bench\]'"):
        acclimate("bench", "accuracy", "--data", folder)


@pytest.mark.parametrize("words", [("--threads", "0"), ("--seed", "-1"), ("--seed", "x"), ("--shifts", "none")])
def test_other_words_are_refused(
    words: tuple[str, ...], acclimate: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        acclimate("bench", "accuracy", *words)
    assert words[0] in capsys.readouterr().err
