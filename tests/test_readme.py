"""The examples of the README, run as they stand there against a real service."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acclimate_client import Client
from acclimate_client.errors import ClientUnknownError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    """The code block that follows `<!-- example: name -->`."""
    found = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"the README has no example {name}"
    return found[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    settings = {"ACCLIMATE_PORT": port, "ACCLIMATE_DATA_DIR": str(tmp_path_factory.mktemp("data"))}
    command = [str(Path(sys.executable).with_name("acclimate")), "serve"]
    process = subprocess.Popen(command, env=os.environ | settings, cwd=ROOT)
    with Client(f"http://127.0.0.1:{port}") as client:
        deadline = time.monotonic() + 60
        while not client.ready():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    assert process.wait(20) == 0


def test_curl_example_predicts_a_boot(url: str) -> None:
    code = example("curl").replace("http://127.0.0.1:8000", url)
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert '"Ankle boot"' in done.stdout
    assert '"version":1' in done.stdout


def test_python_example_runs_and_leaves_no_client(url: str) -> None:
    code = example("python").replace("http://127.0.0.1:8000", url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("('")
    with Client(url) as client, pytest.raises(ClientUnknownError):
        client.get("camera-7")


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_files_that_the_readme_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
