"""The commands of the how-tos, as they stand there, on a small network and real images."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from acclimate_store import load_streams

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CLASSES = ["shirt", "trouser", "pullover", "dress", "coat", "sandal", "blouse", "sneaker", "bag", "boot"]
BLOCK = re.compile(r"```(console|python)\n(.*?)```", re.DOTALL)


def run(folder: Path, command: str) -> str:
    """What a command of a how-to prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def examples(page: str, kind: str) -> list[str]:
    """The code blocks of a how-to of a kind."""
    return [code for found, code in BLOCK.findall((ROOT / "docs" / page).read_text()) if found == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody has the model `pets`, labelled images and the images of clients, in folders."""
    folder = tmp_path_factory.mktemp("pets")
    weights = ROOT / "model_store/bundles/fashion-cnn/1/model.safetensors"
    run(folder, f"acclimate models create pets --arch acclimate:shallow_cnn --weights {weights} "
        f"--classes {','.join(CLASSES)} --mean 0.286 --std 0.353")  # fmt: skip
    for stream in load_streams(ROOT / "model_store/samples/fashion-hybrid/streams.npz"):
        for number, (image, label) in enumerate(zip(stream.images, stream.labels, strict=True)):
            for place in ("validation", f"clients/{stream.client_id}"):
                file = folder / place / CLASSES[label] / f"{stream.client_id}-{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image[0]).save(file)
    return folder


def test_a_network_is_published(tmp_path: Path) -> None:
    network = resnet18(num_classes=2).half()
    weights = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 7, "optimizer": {}}, tmp_path / "best.pt")
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
    (command,) = examples("how-to-own-architecture.md", "console")
    said = run(tmp_path, command)
    assert "weights     prefix 'module.' is removed from the names\n" in said
    assert "classifier  fc: 512 features, 2 classes (cat, dog)\n" in said


def test_a_pickled_model_becomes_weights(tmp_path: Path) -> None:
    torch.save(resnet18(num_classes=2), tmp_path / "model.pt")
    (code,) = examples("how-to-own-architecture.md", "python")
    subprocess.run([sys.executable, "-c", f"import torch\n{code}"], cwd=tmp_path, check=True)
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["fc.bias"].shape == (2,)


def test_it_is_measured_and_an_adapter_is_chosen(folder: Path) -> None:
    said = ""
    for page in ("how-to-measure.md", "how-to-choose-an-adapter.md"):
        (command, *_) = examples(page, "console")
        said += run(folder, command)
    assert re.search(r"^pets/2: published\n  frozen accuracy  76\.\d\d % of 1600 images$", said, re.MULTILINE)
    assert re.search(r"^pets/2: frozen 76\.\d\d % on 8 clients$", said, re.MULTILINE)
    assert re.search(r"^recommended: \w", said, re.MULTILINE)
    assert re.search(r"^pets/3: published, default adapter: \w", said, re.MULTILINE)
