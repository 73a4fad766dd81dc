import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_store.cli import add_parser


@pytest.fixture
def acclimate(store: Path) -> Callable[..., int]:
    parser = argparse.ArgumentParser(prog="acclimate")
    add_parser(parser.add_subparsers(required=True), default_store=store)

    def run(*words: str) -> int:
        arguments = parser.parse_args(words)
        code: int = arguments.run(arguments)
        return code

    return run


def test_list_prints_one_line_for_each_bundle(
    acclimate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert acclimate("models", "list") == 0
    assert capsys.readouterr().out == "tiny/1  acclimate:shallow_cnn  3 classes  1x28x28\n"


def test_list_points_out_an_unreadable_bundle(
    acclimate: Callable[..., int], bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle_dir / "manifest.json").write_text("{")
    assert acclimate("models", "list") == 0
    assert capsys.readouterr().out == "tiny/1  unreadable; see: acclimate models verify tiny/1\n"


def test_show_prints_the_manifest(acclimate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert acclimate("models", "show", "tiny") == 0
    assert json.loads(capsys.readouterr().out)["classes"] == ["ant", "bee", "cat"]


def test_verify_says_ok(acclimate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert acclimate("models", "verify", "tiny") == 0
    assert capsys.readouterr().out == "tiny/1: ok\n"


def test_verify_prints_every_problem_and_fails(
    acclimate: Callable[..., int], bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle_dir / "one").touch()
    (bundle_dir / "two").touch()
    assert acclimate("models", "verify", "tiny/1") == 1
    assert capsys.readouterr().out.splitlines() == [
        "tiny/1: one is not listed in manifest.json",
        "tiny/1: two is not listed in manifest.json",
    ]


def test_verify_trusts_the_architectures_it_is_told_to(
    acclimate: Callable[..., int], edit_manifest: Callable[..., None]
) -> None:
    path = "acclimate_store.shallow_cnn:ShallowCNN"
    edit_manifest(architecture=path)
    assert acclimate("models", "verify", "tiny") == 1
    assert acclimate("models", "verify", "tiny", "--allow-import", path) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("show", "absent"),
        ("verify", "tiny/2"),
        ("verify", "../tiny"),
        ("list", "--store", "/nowhere/at/all"),
        ("verify", "tiny", "--store", "/nowhere/at/all"),
    ],
)
def test_what_is_not_there_is_exit_code_2_and_a_word_on_stderr(
    words: tuple[str, ...], acclimate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert acclimate("models", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_compare_prints_what_becomes_of_clients(
    acclimate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert acclimate("models", "compare", "tiny/1", "tiny") == 0
    assert capsys.readouterr().out.startswith("tiny/1 -> tiny/1: the same model; quantities that differ: none\n")
