"""A small published bundle, and the means to damage a copy of it."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate_adapters import Anchors, Source
from acclimate_store import InputSpec, Manifest, write_bundle
from acclimate_store.shallow_cnn import ShallowCNN

K, D = 3, 64


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    return Manifest(
        schema_version=1,
        name="tiny",
        version="1",
        architecture="acclimate:shallow_cnn",
        architecture_options={"num_classes": K},
        classifier="linear5",
        input=InputSpec(channels=1, height=28, width=28, mean=(0.3,), std=(0.4,)),
        classes=("ant", "bee", "cat"),
        files={},
        metrics={"accuracy": 0.5},
        licence="CC0-1.0",
        provenance="random weights",
    )


@pytest.fixture(scope="session")
def net() -> ShallowCNN:
    torch.manual_seed(0)
    net = ShallowCNN(num_classes=K)
    net(torch.randn(16, 1, 28, 28))  # running statistics away from their defaults
    return net.eval()


@pytest.fixture(scope="session")
def source() -> Source:
    channels = {"bn1": 32, "bn2": 64, "bn3": 64, "bn4": 64}
    moments: dict[str, Tensor] = {}
    for layer, c in channels.items():
        moments |= {f"{layer}.{kind}": torch.rand(K, c) for kind in ("class_mean", "class_square")}
        moments[f"{layer}.row_var"] = torch.rand(c)
    soft = torch.rand(K, K) + torch.eye(K)
    return Source(
        prior=torch.tensor([0.5, 0.3, 0.2]),
        rates={"conv1.weight": 0.1 + 0.2, "bn1.running_mean": -1 / 3},
        confusion={"soft": soft / soft.sum(dim=0), "hard": torch.eye(K)},
        prototypes=torch.randn(K, D),
        descriptor=torch.randn(D),
        anchors=Anchors(torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 0])),
        moments=moments,
    )


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, net: ShallowCNN, source: Source) -> Path:
    """A store with `tiny/1`; read only, use `bundle_dir` to change something."""
    root = tmp_path_factory.mktemp("published")
    write_bundle(root, manifest, net, source, extra={"notes/README.txt": b"hello"})
    return root


@pytest.fixture
def store(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "store"))


@pytest.fixture
def bundle_dir(store: Path) -> Path:
    return store / "tiny" / "1"


@pytest.fixture
def edit_manifest(bundle_dir: Path) -> Callable[..., None]:
    """Set top-level fields of the manifest, without any check."""

    def edit(**changes: Any) -> None:
        path = bundle_dir / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.fixture
def replace_file(bundle_dir: Path, edit_manifest: Callable[..., None]) -> Callable[[str, bytes], None]:
    """Replace a file and its hash, as a publisher with wrong content would."""

    def replace(file: str, content: bytes) -> None:
        (bundle_dir / file).write_bytes(content)
        files = json.loads((bundle_dir / "manifest.json").read_text())["files"]
        edit_manifest(files=files | {file: hashlib.sha256(content).hexdigest()})

    return replace


@pytest.fixture
def edit_tensors(
    bundle_dir: Path, tmp_path: Path, replace_file: Callable[[str, bytes], None]
) -> Callable[[str, Mapping[str, Tensor | None]], None]:
    """Set tensors of a safetensors file, None removes one, and its hash."""

    def edit(file: str, changes: Mapping[str, Tensor | None]) -> None:
        tensors = load_file(bundle_dir / file) | dict(changes)
        save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "edited")
        replace_file(file, (tmp_path / "edited").read_bytes())

    return edit
