"""Which tests are quick, what only some of them need, and recorded clients for all that speak to a service."""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

STREAMS = Path(__file__).parents[1] / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
Images = NDArray[np.uint8]


@pytest.fixture(scope="session")
def integration() -> None:
    """Fixtures that start a service or a Redis ask for this; their tests get the marker of its name."""


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Find a program that only some tests need."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]
    return lambda name: shutil.which(name, path=os.pathsep.join(folders)) or _do_without(name)


@pytest.fixture(scope="session")
def module() -> Callable[[str], ModuleType]:
    """Import a package that only some tests need."""

    def find(name: str) -> ModuleType:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            _do_without(name)

    return find


@pytest.fixture(scope="session")
def expect(module):
    """Assertions about what is drawn on a page: each waits until it holds, and fails after some seconds."""
    return module("playwright.sync_api").expect


@pytest.fixture(scope="module")
def browser(program: Callable[[str], str], module: Callable[[str], ModuleType]) -> Iterator[Any]:
    """Headless Chromium, by Playwright."""
    with module("playwright.sync_api").sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def axe(program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[Any]]:
    """What axe-core, as it is published, finds wrong with a page."""
    folder = tmp_path_factory.mktemp("axe")
    command = [program("npm"), "pack", "axe-core@4", "--silent", "--fetch-retries=0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm finds no packages: {done.stderr.strip()[-300:]}")
    subprocess.run(["tar", "xzf", *(str(each) for each in folder.glob("*.tgz"))], cwd=folder, check=True)
    source = (folder / "package" / "axe.min.js").read_text()

    def violations(page: Any) -> list[Any]:
        page.evaluate(source)
        found = page.evaluate("axe.run(document).then(({ violations }) => violations)")
        return [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]

    return violations


def _do_without(what: str) -> NoReturn:
    """Skip the test; in continuous integration nothing may be missing."""
    missing = pytest.fail if os.environ.get("CI") else pytest.skip
    missing(f"{what} is not installed; `make setup CI=true` brings it, but for nginx and prometheus")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration" in getattr(item, "fixturenames", ()):
            item.add_marker("integration")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage need walk over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def recorded_streams() -> Sequence[Any]:
    """Images and labels of every recorded client."""
    from acclimate_store.samples import load_streams  # it imports torch, and the process that only hands out tests none

    return load_streams(STREAMS)


@pytest.fixture(scope="session")
def labelled(recorded_streams: Sequence[Any]) -> Callable[[int, int], tuple[Images, NDArray[np.int64]]]:
    """The first images of one recorded client, with their labels."""
    return lambda client, number: (
        recorded_streams[client].images[:number],
        recorded_streams[client].labels[:number].astype(np.int64),
    )


@pytest.fixture(scope="session")
def shade() -> Callable[[int], Images]:
    """A batch of one image that tells itself apart by its first pixel; of many shades, as flat ones are skipped."""

    def image(value: int) -> Images:
        made = (np.arange(28 * 28) % 251).astype(np.uint8).reshape(1, 28, 28)
        made[0, 0, 0] = value
        return made

    return image


@pytest.fixture(scope="session")
def stream(recorded_streams: Sequence[Any]) -> Callable[..., list[Images]]:
    """Batches of one recorded client, over and over."""

    def batches(client: int, number: int, size: int = 10) -> list[Images]:
        images = recorded_streams[client].images
        return [images.take(range(i * size, (i + 1) * size), axis=0, mode="wrap") for i in range(number)]

    return batches
