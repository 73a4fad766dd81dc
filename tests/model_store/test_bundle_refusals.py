"""Every way a bundle can be wrong, each on a real bundle that was fine before."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acclimate_store import ArchitectureError, IntegrityError, ManifestError, TensorError, load_bundle
from acclimate_store.bundle import inspect_bundle

NAN = float("nan")
EditTensors = Callable[[str, Mapping[str, Tensor | None]], None]
ReplaceFile = Callable[[str, bytes], None]

WEIGHTS = {
    "a tensor too many": ({"conv9.weight": torch.zeros(1)}, "conv9.weight is unknown to the architecture"),
    "a tensor too few": ({"bn1.running_var": None}, "bn1.running_var is missing"),
    "another shape": (
        {"linear5.bias": torch.zeros(4)},
        r"linear5.bias is float32 \[4\], the architecture has .* \[3\]",
    ),
    "another type": ({"linear5.bias": torch.zeros(3).half()}, r"linear5.bias is float16 \[3\]"),
    "a NaN": ({"linear5.bias": torch.tensor([0.0, NAN, 0.0])}, "linear5.bias holds non-finite numbers"),
    "negative variances": ({"bn1.running_var": torch.full((32,), -1.0)}, "non-finite logits"),
}

SOURCE = {
    "an unknown tensor": ({"colour": torch.zeros(1)}, "colour is unknown"),
    "an unknown moment": ({"moments.bn1.skew": torch.zeros(1)}, "moments.bn1.skew is unknown"),
    "no prior": ({"prior": None}, "prior is missing"),
    "a prior of other classes": ({"prior": torch.full((4,), 0.25)}, r"expected \[4"),
    "a prior that does not sum to 1": ({"prior": torch.full((3,), 0.5)}, "sum to 1"),
    "a class without prior": ({"prior": torch.tensor([0.5, 0.5, 0.0])}, "positive"),
    "a NaN": ({"descriptor": torch.full((64,), NAN)}, "descriptor holds non-finite numbers"),
    "a confusion matrix by rows": (
        {"confusion.hard": torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])},
        "confusion.hard holds P",
    ),
    "a negative confusion": (
        {"confusion.soft": torch.tensor([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])},
        "confusion.soft holds P",
    ),
    "two kinds of confusion": ({"confusion": torch.eye(3)}, "confusion serves both modes"),
    "prototypes of another width": ({"prototypes": torch.zeros(3, 63)}, "prototypes has 63 features"),
    "a descriptor of another width": ({"descriptor": torch.zeros(63)}, "descriptor has 63 features"),
    "anchors without labels": ({"anchors.labels": None}, "anchors.inputs needs its partner"),
    "anchors of another size": ({"anchors.inputs": torch.zeros(4, 1, 32, 32)}, r"asks for \[N, 1, 28, 28\]"),
    "an anchor of no class": ({"anchors.labels": torch.tensor([0, 1, 2, 3])}, "int64, from 0 to 2"),
    "moments of no layer": ({"moments.bn9.row_var": torch.zeros(64)}, "belongs to no BatchNorm layer"),
    "moments of one layer missing": ({"moments.bn4.row_var": None}, "moments.bn4.row_var is missing"),
    "moments of another width": ({"moments.bn4.row_var": torch.zeros(3)}, r"the network needs \[64\]"),
}


@pytest.mark.parametrize("file", ["model.safetensors", "source.safetensors", "source.json", "notes/README.txt"])
def test_one_changed_byte_is_noticed(file: str, bundle_dir: Path) -> None:
    content = bytearray((bundle_dir / file).read_bytes())
    content[-1] ^= 1
    (bundle_dir / file).write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{file} differs from its sha256"):
        load_bundle(bundle_dir)


def test_a_missing_file_is_noticed(bundle_dir: Path) -> None:
    (bundle_dir / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors is missing"):
        load_bundle(bundle_dir)


def test_a_folder_in_place_of_a_file_is_noticed(bundle_dir: Path) -> None:
    (bundle_dir / "notes" / "README.txt").unlink()
    (bundle_dir / "notes" / "README.txt").mkdir()
    with pytest.raises(IntegrityError, match=r"README\.txt differs"):
        load_bundle(bundle_dir)


@pytest.mark.parametrize("file", [".hidden", "weights.pkl", "notes/more.txt"])
def test_a_file_that_is_not_in_the_manifest_is_refused(file: str, bundle_dir: Path) -> None:
    (bundle_dir / file).write_bytes(b"")
    with pytest.raises(IntegrityError, match=f"{file} is not listed"):
        load_bundle(bundle_dir)


def test_a_link_out_of_the_bundle_is_refused(bundle_dir: Path, tmp_path: Path) -> None:
    (bundle_dir / "model.safetensors").rename(tmp_path / "elsewhere")
    (bundle_dir / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match=r"model\.safetensors is a link"):
        load_bundle(bundle_dir)


def test_a_manifest_must_list_the_weights(bundle_dir: Path, edit_manifest: Callable[..., None]) -> None:
    files = json.loads((bundle_dir / "manifest.json").read_text())["files"]
    edit_manifest(files={file: digest for file, digest in files.items() if file != "model.safetensors"})
    with pytest.raises(IntegrityError, match=r"does not list model\.safetensors"):
        load_bundle(bundle_dir)


@pytest.mark.parametrize(("changes", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_refused_for(
    changes: Mapping[str, Tensor | None], message: str, bundle_dir: Path, edit_tensors: EditTensors
) -> None:
    edit_tensors("model.safetensors", changes)
    with pytest.raises(TensorError, match=message):
        load_bundle(bundle_dir)


@pytest.mark.parametrize(("changes", "message"), SOURCE.values(), ids=SOURCE)
def test_a_source_is_refused_for(
    changes: Mapping[str, Tensor | None], message: str, bundle_dir: Path, edit_tensors: EditTensors
) -> None:
    edit_tensors("source.safetensors", changes)
    with pytest.raises(TensorError, match=message):
        load_bundle(bundle_dir)


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ('{"schema_version": 1, "rates": {"conv1.weight": NaN}}', ManifestError, "rates.conv1.weight: .* finite"),
        ('{"schema_version": 1, "rates": {"conv1.weight": 1e999}}', ManifestError, "rates.conv1.weight: .* finite"),
        ('{"schema_version": 1, "rates": {"conv1.weight": "0.1"}}', ManifestError, "valid number"),
        ('{"schema_version": 2, "rates": null}', ManifestError, "schema_version"),
        ('{"schema_version": 1}', ManifestError, "rates: Field required"),
        ('{"schema_version": 1, "rates": {}, "prior": []}', ManifestError, "prior: Extra inputs"),
        ("{", ManifestError, "Invalid JSON"),
        ('{"schema_version": 1, "rates": {"conv9.weight": 0.1}}', TensorError, "rates for conv9.weight"),
    ],
)
def test_source_json_is_refused(
    record: str, error: type[Exception], message: str, bundle_dir: Path, replace_file: ReplaceFile
) -> None:
    replace_file("source.json", record.encode())
    with pytest.raises(error, match=message):
        load_bundle(bundle_dir)


@pytest.mark.parametrize("file", ["model.safetensors", "source.safetensors"])
def test_a_pickle_is_never_read(file: str, bundle_dir: Path, tmp_path: Path, replace_file: ReplaceFile) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    replace_file(file, pickle.dumps(Hostile()))
    with pytest.raises(TensorError, match=f"{file} is not a safetensors file"):
        load_bundle(bundle_dir)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"classes": ["ant", "bee"]}, ManifestError, "names 2 classes, its network has 3"),
        ({"classifier": "linear9"}, TensorError, "'linear9' is neither a linear layer"),
        ({"architecture": "acclimate:other"}, ArchitectureError, "unknown"),
        ({"architecture": "os:system"}, ArchitectureError, "runs only if you trust it"),
        ({"architecture": "torchvision:resnet18"}, TensorError, "does not fit the architecture"),
        ({"architecture_options": {"num_classes": 4}}, TensorError, "linear5.weight is"),
    ],
)
def test_a_manifest_that_contradicts_the_weights_is_refused(
    changes: dict[str, object],
    error: type[Exception],
    message: str,
    bundle_dir: Path,
    edit_manifest: Callable[..., None],
) -> None:
    edit_manifest(**changes)
    with pytest.raises(error, match=message):
        load_bundle(bundle_dir)


def test_a_network_that_cannot_take_the_declared_input_is_refused(
    bundle_dir: Path, edit_manifest: Callable[..., None], edit_tensors: EditTensors
) -> None:
    edit_manifest(input={"channels": 1, "height": 40, "width": 40, "mean": [0.3], "std": [0.4], "resize": None})
    edit_tensors("source.safetensors", {"anchors.inputs": None, "anchors.labels": None})
    with pytest.raises(TensorError, match="fails on a test batch"):
        load_bundle(bundle_dir)


def test_inspection_names_all_problems_and_not_only_the_first(
    bundle_dir: Path, edit_tensors: EditTensors, replace_file: ReplaceFile
) -> None:
    edit_tensors("model.safetensors", {"conv9.weight": torch.zeros(1), "bn1.bias": None})
    edit_tensors("source.safetensors", {"colour": torch.zeros(1)})
    (bundle_dir / "notes" / "README.txt").write_bytes(b"changed")
    (bundle_dir / "extra").touch()
    assert set(inspect_bundle(bundle_dir)) == {
        "notes/README.txt differs from its sha256 in manifest.json",
        "extra is not listed in manifest.json",
        "model.safetensors: bn1.bias is missing",
        "model.safetensors: conv9.weight is unknown to the architecture",
        "source.safetensors: colour is unknown",
    }


def test_inspection_names_a_missing_file_once(bundle_dir: Path) -> None:
    (bundle_dir / "model.safetensors").unlink()
    assert inspect_bundle(bundle_dir) == ("model.safetensors is missing",)


def test_inspection_finds_what_only_shows_when_the_model_runs(bundle_dir: Path, edit_tensors: EditTensors) -> None:
    edit_tensors("model.safetensors", {"bn1.running_var": torch.full((32,), -1.0)})
    assert "non-finite logits" in inspect_bundle(bundle_dir)[0]


def test_inspection_of_a_good_bundle_finds_nothing(bundle_dir: Path) -> None:
    assert inspect_bundle(bundle_dir) == ()
