"""`docs/how-to-upgrade.md`, `how-to-several-models.md` and `how-to-tritonclient.md`, carried out word for word."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from acclimate_service.cli import main
from acclimate_service.settings import read_settings

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "model_store" / "bundles" / "fashion-cnn" / "1"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.S)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The shipped bundle as `one` and `two`; `one` has two versions, with other rates."""
    for key in ("one/1", "one/2", "two/1"):
        folder = Path(shutil.copytree(BUNDLE, tmp_path / key))
        told = json.loads((folder / "manifest.json").read_text())
        told |= dict(zip(("name", "version"), key.split("/"), strict=True))
        (folder / "manifest.json").write_text(json.dumps(told))
    rates = tmp_path / "one" / "2" / "source.json"
    told = json.loads(rates.read_text())
    rates.write_text(json.dumps({**told, "rates": {name: rate / 2 for name, rate in told["rates"].items()}}))
    return tmp_path


def test_the_comparison_is_what_the_page_says(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = blocks("how-to-upgrade.md", "bash")
    assert main([*shlex.split(command)[1:], "--store", str(store)]) == 0
    assert capsys.readouterr().out in blocks("how-to-upgrade.md", "text")


@pytest.mark.integration
def test_several_models_are_served_and_called_as_the_page_says(
    store: Path, run_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(store / "one" / "2")  # of which only the source was changed, and not the hash of it
    serving, calls = blocks("how-to-several-models.md", "bash")
    variable, *command = shlex.split(serving)
    assert command == ["acclimate", "serve"]
    monkeypatch.setenv(*variable.split("="))
    monkeypatch.chdir(ROOT)
    with run_service(model_store=store, data_dir=tmp_path / "data", models=read_settings().models) as replica:
        for call, name in zip(calls.strip().splitlines(), ("one", "two"), strict=True):
            words = shlex.split(call.replace("http://127.0.0.1:8000", replica.url))
            done = subprocess.run(words, capture_output=True, check=True, timeout=60)
            reply = json.loads(done.stdout)
            assert (reply["model"]["name"], reply["state"]["version"]) == (name, 1)
        (example,) = blocks("how-to-several-models.md", "python")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(example.replace("http://127.0.0.1:8000", replica.url), {})
        assert said.getvalue() == "two\n"


def test_tritonclient_is_called_as_the_page_says(replica: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module("tritonclient.http")
    monkeypatch.chdir(ROOT)
    (example,) = blocks("how-to-tritonclient.md", "python")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        address = replica.url.removeprefix("http://")
        exec(example.replace("127.0.0.1:8000", address).replace("camera-7", "page-triton"), {})
    assert said.getvalue() == "Ankle boot (1, 10)\n1\n"
