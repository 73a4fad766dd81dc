"""The tutorial, word by word, in an empty folder."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial-own-model.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<name>\S+) -->\n)?```(?P<kind>bash|python)\n(?P<code>.*?)```", re.DOTALL)
DATA = Path("/usr/share/datasets/fashion-mnist")


class Shown(NamedTuple):
    """What a reader of the tutorial sees, and the folder in which it happened."""

    text: str
    folder: Path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    if not DATA.is_dir():
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("the Debian package dataset-fashion-mnist is not installed")
    folder = tmp_path_factory.mktemp("empty")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = ["set -e"]
    for block in BLOCK.finditer(TUTORIAL.read_text()):
        code = block["code"].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        if block["kind"] == "bash":
            script.append(code)
        else:
            (folder / block["name"]).write_text(code)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    variables |= {"ACCLIMATE_PORT": str(port), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=3600)
            assert process.returncode == 0, text
            yield Shown(text, folder)
        finally:
            with suppress(ProcessLookupError):  # the reader has ended everything
                os.killpg(process.pid, signal.SIGTERM)
            shutil.rmtree(folder / ".data", ignore_errors=True)  # gigabytes


def test_what_the_tutorial_serves_gains_two_points_on_new_clients_and_was_predicted(shown: Shown) -> None:
    """The clients have corruptions and images that nothing was trained, measured or judged on, and label shift."""
    found = re.search(r"served by (\S+): frozen ([\d.]+) %, adapted ([\d.]+) %", shown.text)
    assert found is not None, shown.text
    gain = float(found[3]) - float(found[2])
    told = json.loads((shown.folder / "evaluation.json").read_text())["adapters"]
    (predicted,) = (100 * each["gain"] for each in told if each["adapter"] == found[1])
    assert gain >= 2, shown.text
    assert abs(gain - predicted) <= 1.5, shown.text


def test_the_bundle_of_the_tutorial_has_earned_its_default_adapter(shown: Shown) -> None:
    said = (shown.folder / "serve.log").read_text()
    (chosen,) = re.findall(r"recommended: (\S+),", shown.text)
    assert f"served by {chosen}:" in shown.text
    assert f"default adapter: {chosen}" in said
