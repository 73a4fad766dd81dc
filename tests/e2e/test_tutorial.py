"""The tutorial, word by word, in an empty folder."""

import gzip
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial-own-model.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<name>\S+) -->\n)?```(?P<kind>bash|python)\n(?P<code>.*?)```", re.DOTALL)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""The data, of the package `dataset-fashion-mnist`."""
CARRIED = Path(__file__).parents[2] / "benchmarks" / "data" / "fashion"
"""2400 of the images, for where that is not installed."""


class Shown(NamedTuple):
    """What a reader of the tutorial sees, and the folder in which it happened."""

    text: str
    folder: Path


def lay(folder: Path) -> None:
    """Put the data where the tutorial's scripts look before they fetch them."""
    folder.mkdir(parents=True)
    if DEBIAN.is_dir():
        for file in DEBIAN.glob("*.gz"):
            (folder / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        return
    for part, (images, labels) in carried().items():
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, *images.shape) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels.tobytes())


def carried() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """As many images as the tutorial takes, all classes equally often, made of the few by moving them about.

    Those of "t10k", and those of the last 4000 of "train", are moved from images that are in no other part.
    """
    found: dict[bytes, int] = {}
    for shift in ("label", "multitype"):
        with np.load(CARRIED / shift / "target.npz") as arrays:
            clean = arrays["corruption"] == "none"
            pairs = zip(arrays["images"][clean].reshape(-1, 28, 28), arrays["labels"][clean].ravel(), strict=True)
            found |= {image.tobytes(): int(label) for image, label in pairs}
    images = np.stack([np.frombuffer(image, np.uint8).reshape(28, 28) for image in found])
    labels, draw = np.array(list(found.values())), np.random.default_rng(0)

    def moved(part: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = []
        for label in range(10):
            own = np.flatnonzero(labels == label)
            own = own[np.arange(len(own)) % 4 == part] if part else own[np.arange(len(own)) % 4 < 2]
            chosen.append(draw.choice(own, rows // 10))
        order = draw.permutation(np.concatenate(chosen))
        steps = zip(draw.integers(-2, 3, (rows, 2)), draw.random(rows) < 0.5, strict=True)
        shown = [
            np.roll(images[row][:, :: -1 if flip else 1], step, (0, 1))
            for row, (step, flip) in zip(order, steps, strict=True)
        ]
        return np.stack(shown), labels[order].astype(np.uint8)

    # a half of the images of each class trains, a quarter is laid aside, a quarter is the clients'
    train, aside = moved(0, 12_000), moved(2, 4_000)
    both = tuple(np.concatenate(pair) for pair in zip(train, aside, strict=True))
    return {"train": (both[0], both[1]), "t10k": moved(3, 10_000)}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("empty")
    lay(folder / "data/FashionMNIST/raw")
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
