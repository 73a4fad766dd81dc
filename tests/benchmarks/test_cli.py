import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., int]


def test_a_run_prints_tables_and_writes_what_was_asked_for(
    bench: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    words = ("--data", folder, "--shifts", "label", "--methods", "em", "none", "--seed", 4)
    outputs = ("--json", out / "run.json", "--plot", out / "gains", "--images", out / "images")
    assert bench("accuracy", *words, *outputs) == 0
    printed = capsys.readouterr().out
    assert "seed 4" in printed
    assert "| em " in printed
    assert "2 x 40" in printed
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {"run.json", "gains.png", "gains.svg", "images/em.svg"}
    assert [entry["method"] for entry in json.loads((out / "run.json").read_bytes())["results"]] == ["none", "em"]


def test_an_earlier_run_is_shown_without_any_data(
    bench: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    bench("accuracy", "--data", folder, "--shifts", "label", "--methods", "bn_adapt", "--json", run)
    printed = capsys.readouterr().out
    assert bench("accuracy", "--data", tmp_path / "absent", "--from", run) == 0
    assert capsys.readouterr().out == printed


def test_a_wrong_path_is_refused(bench: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("accuracy", "--data", tmp_path) == 2
    assert "is no benchmark folder" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    bench: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert bench("accuracy", "--data", tmp_path, "--json", tmp_path / "file" / "run.json") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cannot write there" in printed.err


@pytest.mark.parametrize("words", [("--threads", "0"), ("--seed", "-1"), ("--seed", "x"), ("--shifts", "none")])
def test_other_words_are_refused(words: tuple[str, ...], bench: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("accuracy", *words)
    assert words[0] in capsys.readouterr().err
