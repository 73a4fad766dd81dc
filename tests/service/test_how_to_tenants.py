"""`docs/how-to-tenants.md`, carried out word for word."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from acclimate_service.cli import main
from acclimate_service.http.access import NEEDS
from acclimate_service.keys import SCOPES
from acclimate_service.settings import read_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-tenants.md").read_text()
REFERENCE = (ROOT / "docs" / "reference-http.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.integration
def test_a_tenant_gets_a_key_and_calls_with_it(
    run_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, serve, call = blocks("bash")
    assert main(shlex.split(make)[1:]) == 0
    said = capsys.readouterr().out
    (shown,) = blocks("text")
    assert [line[:33] for line in said.splitlines()] == [line[:33] for line in shown.splitlines()]
    key, line = (row[33:] for row in said.splitlines())
    (tmp_path / "keys").write_text(line)
    variable, *command = shlex.split(serve)
    assert command == ["acclimate", "serve"]
    monkeypatch.setenv(*variable.split("=", 1))
    monkeypatch.setenv("KEY", key)
    file = tmp_path / (read_settings().keys_file or "")
    monkeypatch.chdir(ROOT)
    with run_service(keys_file=file, data_dir=tmp_path / "data") as replica:
        command = ["bash", "-c", call.replace("http://127.0.0.1:8000", replica.url)]
        reply = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        assert (reply["client_id"], reply["state"]["version"]) == ("camera-7", 1)
        (example,) = blocks("python")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(example.replace("http://127.0.0.1:8000", replica.url), {})
        assert printed.getvalue() == "('Ankle boot',)\n"
        assert replica.keys("acme/camera-7")


def test_the_scopes_of_the_page_are_those_that_there_are() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == SCOPES


def test_the_reference_says_of_every_route_what_its_key_must_be_good_for() -> None:
    table = REFERENCE.partition("| scope | routes |")[2].partition("\n\n")[0]
    told = {}
    for row in table.splitlines()[2:]:
        scope, routes = (cell.strip() for cell in row.strip("|").split("|"))
        need = {"any key": "any key", "none": "anybody"}.get(scope, scope.strip("`"))
        for methods, words in re.findall(r"((?:`[A-Z]+` and )*)`([^`]*)`", routes):
            *verbs, path = words.rsplit(" ", 1)
            for method in [*re.findall("[A-Z]+", methods), *verbs]:
                told[f"{method} {path.replace('...', '/clients/{client_id}')}"] = need
            if not verbs:  # another path of the method before it
                told[f"{method} {path.replace('...', '/clients/{client_id}')}"] = need
    pages = {"GET /docs", "GET /openapi.json", "GET /ui"}
    needs = {name: need for name, need in NEEDS.items() if "/versions/" not in name}
    assert told == {**dict.fromkeys(pages, "anybody"), **needs}
