"""What computes a bundle's passes: ONNX Runtime where it carries the graphs of its very model, else torch."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from acclimate_adapters import ADAPTERS, Step, create, missing
from acclimate_adapters.merged import Work, guarded_steps
from acclimate_store import Bundle, Catalogue, GraphError
from acclimate_store.files import GRAPHS
from acclimate_store.onnx_graphs import provider_for

pytestmark = pytest.mark.integration

SHIPPED = Path(__file__).parents[2] / "model_store/bundles"


@pytest.fixture(scope="module")
def both() -> tuple[Bundle, Bundle]:
    """The shipped bundle in torch and on ONNX Runtime."""
    torch.set_num_threads(1)
    catalogue = Catalogue(SHIPPED)
    return catalogue.load("fashion-cnn", "1"), catalogue.load("fashion-cnn", "1", runtime="onnx")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, exported: Any) -> Path:
    """A store with that `tiny/1` alone."""
    root = tmp_path_factory.mktemp("measured")
    shutil.copytree(exported.root / "tiny/1", root / "tiny/1")
    return root


@pytest.fixture
def acclimate(store: Path, run: Callable[..., int]) -> Callable[..., int]:
    return partial(run, store)


def images(bundle: Bundle, rows: int) -> Tensor:
    pixels = np.random.default_rng(rows).integers(0, 256, (rows, *bundle.manifest.input.shape), dtype=np.uint8)
    return bundle.prepare(pixels)


@pytest.mark.parametrize("rows", [1, 2, 20, 130])
def test_any_number_of_rows_is_answered_like_in_torch(rows: int, both: tuple[Bundle, Bundle]) -> None:
    in_torch, in_onnx = (bundle.model.frozen(images(bundle, rows)) for bundle in both)
    torch.testing.assert_close(in_onnx.logits, in_torch.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(in_onnx.features, in_torch.features, rtol=1e-4, atol=1e-5)


def test_it_says_what_computes_and_is_the_same_model(both: tuple[Bundle, Bundle]) -> None:
    in_torch, in_onnx = both
    assert (in_torch.runtime, in_torch.passes) == (f"torch {torch.__version__}", None)
    assert in_onnx.runtime.startswith("onnxruntime 1.")
    assert in_onnx.passes is not None
    assert in_onnx.model.content_hash == in_torch.model.content_hash


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_every_adapter_steps_in_company_as_in_torch(name: str, both: tuple[Bundle, Bundle]) -> None:
    adapter = create(name, **({"views": 2} if name == "memo" else {}))
    if missing(adapter, both[0].model):
        pytest.skip("the shipped model has not what it needs")
    states = [adapter.init(both[0].model)] * 3
    batches = [images(both[0], rows) for rows in (20, 1, 7)]
    works = [Work(adapter, state, x, compare=True) for state, x in zip(states, batches, strict=True)]
    in_torch, in_onnx = (guarded_steps(bundle.model, works, bundle.passes) for bundle in both)
    for one, other in zip(in_torch, in_onnx, strict=True):
        assert isinstance(one, Step)
        assert isinstance(other, Step)
        torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.frozen_logits, one.frozen_logits, rtol=1e-4, atol=1e-4)


def test_add_onnx_publishes_the_next_version_and_says_what_it_does(exported: Any) -> None:
    assert exported.out == "tiny/2: published with ONNX graphs\n"
    assert [line for line in exported.err.splitlines() if line.endswith("...")] == [
        *(f"exporting {file} ..." for file in GRAPHS),
        "checking against torch and publishing tiny/2 ...",
    ]
    before, after = (Catalogue(exported.root).manifest("tiny", version) for version in "12")
    assert after.files.keys() - before.files.keys() == {*GRAPHS}
    assert before.files.items() <= after.files.items()
    assert after.provenance.endswith("ONNX graphs exported from tiny/1.")
    assert Catalogue(exported.root).verify("tiny", "2") == ()


@pytest.mark.parametrize(
    ("version", "reason"), [("1", "published already"), ("2", "published already"), ("../2", "use 1 to 64 letters")]
)
def test_a_version_that_cannot_be_published_is_refused_before_anything_is_exported(
    version: str, reason: str, run: Callable[..., int], exported: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(exported.root, "models", "add-onnx", "tiny/1", "--as", version) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "exporting" not in said


def test_graphs_name_no_place_in_anybodys_source_code(exported: Any) -> None:
    for file in GRAPHS:
        graph = onnx.load(exported.root / "tiny/2" / file).graph
        assert not any(node.metadata_props or node.doc_string for node in graph.node)


def test_auto_takes_onnx_where_there_are_graphs_and_torch_where_there_are_none(exported: Any) -> None:
    catalogue = Catalogue(exported.root)
    assert catalogue.load("tiny", "1", runtime="auto").runtime.startswith("torch")
    assert catalogue.load("tiny", "2", runtime="auto").runtime.startswith("onnxruntime")
    assert catalogue.load("tiny", "2", runtime="torch").runtime.startswith("torch")


def test_onnx_is_refused_for_a_bundle_without_graphs(exported: Any) -> None:
    with pytest.raises(GraphError, match=r"it carries no frozen\.onnx; `acclimate models add-onnx` publishes"):
        Catalogue(exported.root).load("tiny", "1", runtime="onnx")


@pytest.mark.parametrize("runtime", ["auto", "onnx"])
@pytest.mark.parametrize("file", GRAPHS)
def test_a_graph_that_answers_otherwise_than_torch_is_refused(
    file: str, runtime: Any, exported: Any, bundle_dir: Path, replace_file: Callable[[str, bytes], None]
) -> None:
    for name in GRAPHS:
        graph = onnx.load(exported.root / "tiny/2" / name)
        if name == file:
            _, largest = max((len(each.raw_data), i) for i, each in enumerate(graph.graph.initializer))
            weights = graph.graph.initializer[largest]
            weights.raw_data = (np.frombuffer(weights.raw_data, np.float32) * 1.5).tobytes()
        replace_file(name, graph.SerializeToString())
    catalogue = Catalogue(bundle_dir.parents[1])
    with pytest.raises(GraphError, match=rf"{file}.* answers a test batch otherwise than torch: .* export it again"):
        catalogue.load("tiny", "1", runtime=runtime)
    assert "otherwise than torch" in catalogue.verify("tiny", "1")[0]
    assert catalogue.load("tiny", "1").runtime.startswith("torch")


def test_a_bundle_with_a_part_of_the_graphs_is_refused_and_told_how_to_mend_it(
    exported: Any, store: Path, edit_manifest: Callable[..., None], bundle_dir: Path
) -> None:
    whole = Catalogue(exported.root).manifest("tiny", "2").files
    for file in ("frozen.onnx", "balanced.onnx"):
        shutil.copy(exported.root / "tiny/2" / file, bundle_dir)
    files = Catalogue(store).manifest("tiny", "1").files
    edit_manifest(files={**files, **{file: whole[file] for file in ("frozen.onnx", "balanced.onnx")}})
    with pytest.raises(GraphError, match=r"balanced\.onnx needs balanced_stem\.onnx.*`acclimate models add-onnx`"):
        Catalogue(store).load("tiny", "1", runtime="auto")


def test_what_is_no_graph_is_refused(bundle_dir: Path, replace_file: Callable[[str, bytes], None]) -> None:
    replace_file("frozen.onnx", b"no graph")
    with pytest.raises(GraphError, match="ONNX Runtime cannot load the graph"):
        Catalogue(bundle_dir.parents[1]).load("tiny", "1", runtime="auto")


@pytest.mark.parametrize(("file", "other"), [(file, GRAPHS[i - 1]) for i, file in enumerate(GRAPHS)])
def test_a_graph_of_the_model_that_cannot_be_run_is_refused(
    file: str, other: str, exported: Any, bundle_dir: Path, replace_file: Callable[[str, bytes], None]
) -> None:
    for name in GRAPHS:
        replace_file(name, (exported.root / "tiny/2" / (other if name == file else name)).read_bytes())
    catalogue = Catalogue(bundle_dir.parents[1])
    with pytest.raises(GraphError, match="ONNX graphs cannot be run: "):
        catalogue.load("tiny", "1", runtime="auto")
    assert "cannot be run" in catalogue.verify("tiny", "1")[0]


def test_a_device_without_provider_is_refused_by_name() -> None:
    with pytest.raises(GraphError, match=r"ONNX Runtime 1\..* cannot use meta: it has .*CPUExecutionProvider"):
        provider_for(torch.device("meta"))


def test_a_model_that_is_measured_again_leaves_the_graphs_of_the_old_one_behind(
    acclimate: Callable[..., int], exported: Any, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported.root / "tiny/2", store / "tiny/2")
    labels = np.arange(30) % 10
    pixels = np.random.default_rng(0).integers(0, 256, (30, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "labelled.npz", images=pixels, labels=labels)
    words = ("--data", tmp_path / "labelled.npz", "--as", "measured", "--no-onnx", "--force")
    assert acclimate("models", "measure", "tiny/2", *words) == 0
    files: Mapping[str, str] = Catalogue(store).manifest("tiny", "measured").files
    assert files.keys().isdisjoint(GRAPHS)
    assert "notes/README.txt" in files


def test_a_store_is_read_without_onnx_runtime() -> None:
    """Torch alone is enough: `auto` then takes it, `onnx` says what to install."""
    code = f"""
import sys
sys.modules["onnxruntime"] = None
import importlib.util, pathlib
find = importlib.util.find_spec
import acclimate_store.runtimes as runtimes
runtimes.find_spec = lambda name: None if name == "onnxruntime" else find(name)
from acclimate_store import Catalogue
catalogue = Catalogue(pathlib.Path({str(SHIPPED)!r}))
print(catalogue.load("fashion-cnn", "1", runtime="auto").runtime)
try:
    catalogue.load("fashion-cnn", "1", runtime="onnx")
except Exception as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("torch")
    assert said[1].endswith('pip install "acclimate[cpu]"')
