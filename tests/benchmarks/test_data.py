import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from acclimate_bench.data.fashion import FASHION, check_fashion, load_fashion
from acclimate_bench.data.shift import Shift
from acclimate_bench.errors import BenchError

ROOT = Path(__file__).parents[2]


def change_target(folder: Path, **changes: np.ndarray) -> None:
    path = folder / "label" / "target.npz"
    with np.load(path) as target:
        arrays = dict(target)
    np.savez(path, **(arrays | changes))


def test_a_reduced_set_is_compared_with_the_same_clients_of_the_full_one(
    carried: Path, shift: Callable[[str], Shift]
) -> None:
    recorded = json.loads((carried / "accuracy.json").read_bytes())["shifts"]["feature"]["methods"]["em"]["per_client"]
    feature = shift("feature")
    assert feature.clients == (2, 7, 12, 17, 22, 27, 32, 37)
    assert len(recorded) == 40
    assert feature.recorded["em"].accuracy[37] == recorded[37]


def test_clients_of_a_full_set_are_numbered_in_their_order(folder: Path) -> None:
    path = folder / "label" / "target.npz"
    with np.load(path) as target:
        arrays = {name: target[name] for name in target.files if name != "clients"}
    np.savez(path, **arrays)
    assert load_fashion(folder, "label").clients == (0, 1)


def test_a_separate_record_of_balanced_is_read(folder: Path) -> None:
    record = {"shifts": {"label": {"mean": 0.5, "per_client": [0.25] * 40}}}
    (folder / "balanced_accuracy.json").write_text(json.dumps(record))
    assert load_fashion(folder, "label").recorded["balanced"].accuracy[7] == 0.25


def test_every_shift_can_serve_every_method_but_one(shift: Callable[[str], Shift]) -> None:
    for name in FASHION:
        model = shift(name).model
        offered = {"rates", "confusion", "prototypes", "descriptor", "moments", "gradients", "batch_norm"}
        assert offered <= model.offers
        assert ("anchors" in model.offers) == (name == "hybrid")


def test_anchors_of_the_carried_set_serve_the_same_weights_elsewhere(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shutil.copytree(carried / "hybrid", tmp_path / "hybrid", ignore=shutil.ignore_patterns("anchors.npz"))
    shutil.copy(carried / "accuracy.json", tmp_path)
    assert "anchors" in load_fashion(tmp_path, "hybrid").model.offers
    shutil.copy(carried / "feature" / "model.safetensors", tmp_path / "hybrid")
    assert "anchors" not in load_fashion(tmp_path, "hybrid").model.offers


def test_the_carried_set_is_small(carried: Path) -> None:
    assert sum(path.stat().st_size for path in carried.rglob("*")) < 6e6


def test_a_wrong_path_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=r"nowhere is no benchmark folder, it lacks accuracy.json and 5 more; expected.*target.npz"
    ):
        check_fashion(tmp_path / "nowhere", ["label"])


def test_one_missing_file_is_named(folder: Path) -> None:
    (folder / "label" / "rates.json").unlink()
    with pytest.raises(BenchError, match=r"lacks label/rates.json; expected"):
        load_fashion(folder, "label")


def test_a_shift_without_a_record_is_refused(folder: Path) -> None:
    (folder / "accuracy.json").write_text('{"shifts": {}}')
    with pytest.raises(BenchError, match="does not describe the shift 'label'"):
        load_fashion(folder, "label")


@pytest.mark.parametrize("file", ["accuracy.json", "label/rates.json"])
def test_broken_json_is_refused(file: str, folder: Path) -> None:
    (folder / file).write_text("{")
    with pytest.raises(BenchError, match=f"{file} is not JSON"):
        load_fashion(folder, "label")


@pytest.mark.parametrize("file", ["aux.npz", "balanced_source.npz", "target.npz"])
def test_what_is_no_archive_is_refused(file: str, folder: Path) -> None:
    (folder / "label" / file).write_bytes(b"PK\x03\x04junk")
    with pytest.raises(BenchError, match=f"{file} cannot be read"):
        load_fashion(folder, "label")


def test_missing_arrays_are_named(folder: Path) -> None:
    np.savez(folder / "label" / "aux.npz", prototypes=np.zeros((10, 64), np.float32))
    with pytest.raises(BenchError, match="lacks the arrays bbse_counts_soft, bbse_counts_hard, local_descriptor_mean"):
        load_fashion(folder, "label")


@pytest.mark.parametrize(
    "images", [np.zeros((2, 40, 28, 28)), np.zeros((2, 39, 28, 28), np.uint8), np.zeros((2, 40, 32, 32), np.uint8)]
)
def test_images_of_another_type_or_shape_are_refused(images: np.ndarray, folder: Path) -> None:
    change_target(folder, images=images)
    with pytest.raises(BenchError, match="needs images uint8"):
        load_fashion(folder, "label")


def test_weights_of_another_network_are_refused(folder: Path) -> None:
    (folder / "label" / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(BenchError, match="not a safetensors file"):
        load_fashion(folder, "label")


def test_the_tool_keeps_every_fifth_client_and_all_recorded_accuracies(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    shutil.copytree(carried, full, ignore=shutil.ignore_patterns("target.npz", "anchors.npz"))
    shutil.copy(carried / "accuracy.json", full / "balanced_accuracy.json")
    record = json.loads((full / "accuracy.json").read_bytes())
    balanced = {shift: record["shifts"][shift]["methods"].pop("balanced") for shift in FASHION}
    (full / "accuracy.json").write_text(json.dumps(record))
    (full / "balanced_accuracy.json").write_text(json.dumps({"shifts": balanced}))
    images = np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1) * np.ones((1, 20, 28, 28), np.uint8)
    for name in FASHION:
        np.savez(full / name / "target.npz", images=images, labels=np.zeros((40, 20), np.int64))
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("make_bench_data")
    monkeypatch.setattr("sys.argv", ["make_bench_data", str(full), "--output", str(tmp_path / "reduced")])
    tool.main()
    reduced = load_fashion(tmp_path / "reduced", "hybrid")
    assert reduced.images[:, 0, 0, 0].tolist() == list(reduced.clients) == [2, 7, 12, 17, 22, 27, 32, 37]
    assert reduced.recorded["balanced"].accuracy == dict(enumerate(balanced["hybrid"]["per_client"]))
    assert "MIT License" in (tmp_path / "reduced" / "LICENSE.txt").read_text()
