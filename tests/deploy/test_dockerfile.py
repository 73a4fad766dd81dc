import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def arguments(dockerfile, keyword, stage="runtime-cpu"):
    return [one.arguments for one in dockerfile if (one.stage, one.keyword) == (stage, keyword)]


@pytest.fixture(scope="module")
def lint(program):
    """Lint a Dockerfile."""
    command = [program("hadolint"), "--no-color"]
    return lambda path: subprocess.run([*command, path], capture_output=True, text=True, check=False)


def test_the_dockerfile_has_nothing_the_linter_objects_to(lint):
    verdict = lint(ROOT / "Dockerfile")
    assert verdict.returncode == 0, verdict.stdout


def test_the_linter_objects_to_an_entrypoint_in_shell_form_which_swallows_the_stop_signal(lint, tmp_path):
    spoiled = (ROOT / "Dockerfile").read_text().replace('ENTRYPOINT ["acclimate"]', "ENTRYPOINT acclimate")
    (tmp_path / "Dockerfile").write_text(spoiled)
    assert "DL3025" in lint(tmp_path / "Dockerfile").stdout


def test_the_base_image_names_its_minor_version_and_its_distribution(dockerfile):
    assert arguments(dockerfile, "FROM", "base") == ["${BASE} AS base"]
    assert re.search(r"^ARG BASE=python:3\.\d+-slim-[a-z]+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_the_process_of_the_container_is_acclimate_serve_without_a_shell(dockerfile):
    (entrypoint,), (command,) = arguments(dockerfile, "ENTRYPOINT"), arguments(dockerfile, "CMD")
    assert json.loads(entrypoint) + json.loads(command) == ["acclimate", "serve"]


def test_the_container_does_not_run_as_root(dockerfile):
    (user,) = arguments(dockerfile, "USER")
    assert int(user.partition(":")[0]) > 0


def test_every_runtime_is_an_extra_of_the_distribution(dockerfile, project):
    runtimes = {one.stage.removeprefix("runtime-") for one in dockerfile if one.stage.startswith("runtime-")}
    assert runtimes == {"cpu", "gpu"}
    assert runtimes < project["optional-dependencies"].keys()


def test_the_image_is_labelled_with_the_version_of_the_distribution(dockerfile, project):
    (labels,) = arguments(dockerfile, "LABEL")
    assert f'image.version="{project["version"]}"' in labels


def test_the_build_context_holds_what_is_copied_and_nothing_else(dockerfile):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        one.arguments.split()[:-1] for one in dockerfile if one.keyword == "COPY" and "--from" not in one.arguments
    ]
    assert lines.index("*") < min(i for i, line in enumerate(lines) if line.startswith("!"))
    assert {line[1:] for line in lines if line.startswith("!")} == {source for sources in copied for source in sources}
