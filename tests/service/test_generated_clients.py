"""`docs/how-to-generate-a-client.md`, carried out word for word with the generator as it is published."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-generate-a-client.md").read_text()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(replica: Any, program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated package is."""
    folder = tmp_path_factory.mktemp("generated")
    (command,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    name, *options = shlex.split(command.replace("http://127.0.0.1:8000", replica.url))
    done = subprocess.run(
        [program(name), *options], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_operation_is_there(folder: Path, replica: Any) -> None:
    document = replica.http.get("/openapi.json").json()
    names = {each["operationId"] for operations in document["paths"].values() for each in operations.values()}
    assert {path.stem for path in (folder / "acclimate_api" / "api").glob("*/[a-z]*.py")} == names


@pytest.mark.parametrize(
    ("client_id", "said"), [("page-generated", "Ankle boot 1 True\n"), ("-7", "invalid_client_id ")]
)
def test_a_prediction_and_a_problem_have_types(folder: Path, replica: Any, client_id: str, said: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    asked = code.replace("http://127.0.0.1:8000", replica.url).replace("camera-7", client_id)
    assert run(folder, asked).startswith(said)


def test_a_photograph_is_predicted(folder: Path, replica: Any, tmp_path: Path) -> None:
    from PIL import Image

    with Image.open(ROOT / "docs" / "images" / "boot.png") as image:
        image.convert("L").save(tmp_path / "boot.jpg", quality=95)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    code = code.replace("docs/images/boot.png", str(tmp_path / "boot.jpg")).replace("image/png", "image/jpeg")
    code = code.replace("http://127.0.0.1:8000", replica.url).replace("camera-7", "page-photograph")
    assert run(folder, code) == "Ankle boot 1 True\n"
