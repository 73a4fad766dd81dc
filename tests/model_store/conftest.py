"""A small published bundle, one with graphs for ONNX Runtime, and the means to damage a copy of them."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate_adapters import Anchors, Source
from acclimate_store import Catalogue, InputSpec, Manifest, write_bundle
from acclimate_store.bundle import write_files
from acclimate_store.cli import add_parser
from acclimate_store.files import GRAPHS
from acclimate_store.shallow_cnn import ShallowCNN

K, D = 3, 64
SHIPPED = Path(__file__).parents[2] / "model_store/bundles"


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


class Exported(NamedTuple):
    """A store with `tiny/1`, here the shipped model without graphs, and `tiny/2`, to which the command added them."""

    root: Path
    out: str
    err: str


@pytest.fixture(scope="session")
def run() -> Callable[..., int]:
    """The command on a store: `run(root, "models", "list")`; gives its exit status."""

    def command(root: Path, *words: str | Path) -> int:
        parser = argparse.ArgumentParser(prog="acclimate")
        add_parser(parser.add_subparsers(required=True), default_store=root)
        arguments = parser.parse_args(list(map(str, words)))
        code: int = arguments.run(arguments)
        return code

    return command


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., int]) -> Exported:
    """Graphs take long to export: those of one model are enough. Read only."""
    root, shipped = tmp_path_factory.mktemp("exported"), Catalogue(SHIPPED).manifest("fashion-cnn", "1")
    files: dict[str, bytes | Path] = {
        file: SHIPPED / "fashion-cnn/1" / file for file in shipped.files if file not in GRAPHS
    }
    manifest = shipped.model_copy(update={"name": "tiny", "files": {}})
    write_files(root, manifest, {**files, "notes/README.txt": b"hello"})
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert run(root, "models", "add-onnx", "tiny") == 0, err.getvalue()
    return Exported(root, out.getvalue(), err.getvalue())


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
