"""`docs/how-to-generate-a-client.md`, carried out word for word with the generators as they are published."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-generate-a-client.md").read_text()
HERE = "http://127.0.0.1:8000"
BOOT = "docs/images/boot.png"

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def require_npm_packages(npm: str) -> None:
    """Skip where nothing can be installed from npm, as behind a wall."""
    command = [npm, "view", "typescript@5", "version", "--fetch-retries=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm finds no packages: {done.stderr.strip()[-300:]}")


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What it prints. Programs that it starts by name are those installed beside it."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A photograph's path."""
    from PIL import Image

    path = tmp_path_factory.mktemp("photographs") / "boot.jpg"
    with Image.open(ROOT / BOOT) as image:
        image.convert("L").save(path, quality=95)
    return str(path)


@pytest.fixture(scope="module")
def python(replica: Any, program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated package is."""
    folder = tmp_path_factory.mktemp("python")
    name, *options = shlex.split(blocks("bash")[0].replace(HERE, replica.url))
    run([program(name), *options], folder)
    return folder


@pytest.fixture(scope="module")
def typescript(replica: Any, program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated module and the page's program are, which the compiler finds nothing wrong with."""
    folder = tmp_path_factory.mktemp("typescript")
    require_npm_packages(program("npm"))
    (folder / "package.json").write_text(json.dumps({"private": True}))
    (folder / "predict.ts").write_text(blocks("ts")[0])
    generate, compile_and_run = blocks("bash")[1:]
    commands = [*generate.splitlines(), compile_and_run.splitlines()[0]]
    for command in commands:
        name, *options = shlex.split(command.replace(HERE, replica.url))
        run([program(name), *options], folder)
    return folder


def test_every_operation_is_there(python: Path, replica: Any) -> None:
    document = replica.http.get("/openapi.json").json()
    names = {each["operationId"] for operations in document["paths"].values() for each in operations.values()}
    assert {path.stem for path in (python / "acclimate_api" / "api").glob("*/[a-z]*.py")} == names


@pytest.mark.parametrize(
    ("client_id", "said"), [("page-generated", "Ankle boot 1 True\n"), ("-7", "invalid_client_id ")]
)
def test_a_prediction_and_a_problem_have_types(python: Path, replica: Any, client_id: str, said: str) -> None:
    code = blocks("python")[0].replace(HERE, replica.url).replace("camera-7", client_id)
    assert run([sys.executable, "-c", code], ROOT, PYTHONPATH=str(python)).startswith(said)


def test_a_photograph_is_predicted(python: Path, replica: Any, jpeg: str) -> None:
    code = blocks("python")[0].replace(BOOT, jpeg).replace("image/png", "image/jpeg")
    code = code.replace(HERE, replica.url).replace("camera-7", "page-photograph")
    assert run([sys.executable, "-c", code], ROOT, PYTHONPATH=str(python)) == "Ankle boot 1 True\n"


@pytest.mark.parametrize(
    ("client_id", "said"), [("page-typescript", "Ankle boot 1 true\n"), ("-7", "invalid_client_id ")]
)
def test_typescript_knows_a_prediction_and_a_problem(
    typescript: Path, replica: Any, program: Any, jpeg: str, client_id: str, said: str
) -> None:
    code = (typescript / "predict.js").read_text().replace(HERE, replica.url)
    (typescript / "asked.js").write_text(code.replace(BOOT, jpeg).replace("camera-7", client_id))
    assert run([program("node"), "asked.js"], typescript).startswith(said)
