"""The Dockerfile's own commands, carried out in a folder instead of an image, and what they built, started."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from itertools import chain
from pathlib import Path
from string import Template

import httpx
import numpy as np
import pytest

pytestmark = pytest.mark.slow  # pip installs into the image for most of a minute
ROOT = Path(__file__).parents[2]
_PATHS = re.compile(r"(?<![\w/])/(?=(opt/acclimate|build|var/lib/acclimate)\b)")
"""Paths that the Dockerfile makes; they move below the folder that stands for the image."""


class Image:
    """Instructions of a Dockerfile, carried out below `root`: all but what needs Debian's packages or another user."""

    def __init__(self, context: Path, root: Path) -> None:
        self._context = context
        self.root = root
        self.cwd = root
        self.environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "RUNTIME": "cpu", "LOCKED": ""}

    def move(self, text: str) -> str:
        return _PATHS.sub(f"{self.root}/", text)

    def carry_out(self, keyword: str, arguments: str) -> None:
        match keyword:
            case "ENV":
                pairs = (pair.split("=", 1) for pair in shlex.split(self.move(arguments)))
                self.environment |= {name: Template(value).substitute(self.environment) for name, value in pairs}
            case "WORKDIR":
                self.cwd = Path(self.move(arguments))
                self.cwd.mkdir(parents=True, exist_ok=True)
            case "COPY" if not arguments.startswith("--from"):
                *sources, target = arguments.split()
                for source in sources:
                    self._copy(self._context / source, self.cwd / self.move(target), into=target.endswith("/"))
            case "RUN":
                command = re.sub(r"--mount=\S+\s+", "", arguments)
                if not command.startswith("apt-get"):
                    subprocess.run(["bash", "-ec", self.move(command)], cwd=self.cwd, env=self.environment, check=True)

    def _copy(self, source: Path, target: Path, *, into: bool) -> None:
        target = target / source.name if into else target
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The build context: what git would check out, less what .dockerignore leaves out."""
    target = tmp_path_factory.mktemp("context")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in listed.stdout.splitlines():
        if any(Path(name).is_relative_to(path) for path in kept) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def borrow(venv):
    """Let pip count what this environment has as installed, instead of fetching gigabytes for a test."""
    packages = venv / f"lib/python{sysconfig.get_python_version()}/site-packages"
    for seeded in packages.glob("setuptools*"):  # older than what torch asks for
        shutil.rmtree(seeded)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def image(context, tmp_path_factory, dockerfile):
    built = Image(context, tmp_path_factory.mktemp("image"))
    built.environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    for one in dockerfile:
        if one.stage in {"base", "dependencies", "wheel", "runtime-cpu"}:
            built.carry_out(one.keyword, one.arguments)
        if "-m venv" in one.arguments:
            borrow(built.root / "opt/acclimate/venv")
    return built


@pytest.fixture(scope="module")
def container(image, dockerfile, replica):
    """The process that a container of the image starts, in the directory it starts in; ready."""
    entrypoint = (json.loads(one.arguments) for one in dockerfile if one.keyword in {"ENTRYPOINT", "CMD"})
    name, *arguments = chain.from_iterable(entrypoint)
    command = [shutil.which(name, path=image.environment["PATH"]), *arguments]
    started = replica(image.environment, command, image.cwd)
    started.wait_until_ready()
    return started


def probe(image, dockerfile, environment):
    """What the image's HEALTHCHECK says."""
    (check,) = (one.arguments for one in dockerfile if one.keyword == "HEALTHCHECK")
    command = json.loads(image.move(check.partition("CMD ")[2]))
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_image_holds_the_code_itself_and_not_a_link_to_the_sources(image):
    names = "acclimate_service", "acclimate_store", "acclimate_adapters"
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {names}), sep='\\n')"
    python = image.root / "opt/acclimate/venv/bin/python"
    shown = subprocess.run([python, "-c", code], env=image.environment, capture_output=True, text=True, check=True)
    assert all(Path(origin).is_relative_to(image.root) for origin in shown.stdout.splitlines())


def test_the_entrypoint_answers_a_prediction_with_the_model_and_the_redis_of_the_image(container):
    body = io.BytesIO()
    np.save(body, np.zeros((2, 1, 28, 28), np.uint8))
    headers = {"Content-Type": "application/x-npy"}
    reply = httpx.post(f"{container.url}/clients/phone/predict", content=body.getvalue(), headers=headers)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["predictions"]) == 2
    assert reply.json()["state"]["committed"] is True


def test_the_states_are_kept_in_the_volume(container, image, dockerfile):
    (volume,) = (one.arguments for one in dockerfile if one.keyword == "VOLUME")
    assert list(Path(image.move(volume)).glob("appendonly*"))


def test_the_health_check_passes_also_where_a_proxy_is_configured(container, image, dockerfile):
    proxied = container.environment | {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    verdict = probe(image, dockerfile, proxied)
    assert verdict.returncode == 0, verdict.stderr


def test_the_health_check_fails_where_nobody_listens_and_says_so(container, image, dockerfile):
    verdict = probe(image, dockerfile, container.environment | {"ACCLIMATE_PORT": "9"})
    assert verdict.returncode == 1
    assert "no answer" in verdict.stderr


def test_the_stop_signal_ends_the_container_with_status_0(container, image, dockerfile):
    (name,) = (one.arguments for one in dockerfile if one.keyword == "STOPSIGNAL")
    assert name == "SIGTERM"
    assert container.stop() == 0
