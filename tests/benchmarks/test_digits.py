import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_bench.data.digits import DIGITS, load_digits
from acclimate_bench.data.shift import Shift
from acclimate_bench.data.shifts import SHIFTS, Folders
from acclimate_bench.errors import BenchError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copied(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "digits"))


def test_every_other_client_is_compared_with_its_own_recorded_accuracy(
    digits: Path, shift: Callable[[str], Shift]
) -> None:
    recorded = json.loads((digits / "accuracy.json").read_bytes())["domain_label"]
    loaded = shift("domain_label")
    assert loaded.clients == tuple(range(0, 20, 2))
    assert loaded.recorded["bn_adapt"].accuracy[16] == recorded["bn_adapt_16"][16]
    assert loaded.recorded["em"].accuracy[16] == recorded["em_2"][16]


def test_pixels_are_only_divided_by_255(shift: Callable[[str], Shift]) -> None:
    loaded = shift("domain")
    assert loaded.x(3).shape == (200, 1, 28, 28)
    torch.testing.assert_close(loaded.x(3)[:, 0], torch.from_numpy(loaded.images[3]).float() / 255)


def test_the_model_knows_its_classes_and_moments_and_has_no_rates(shift: Callable[[str], Shift]) -> None:
    model = shift("domain").model
    assert {"moments", "batch_norm", "gradients"} <= model.offers
    assert not {"rates", "confusion", "prototypes", "descriptor", "anchors"} & model.offers
    assert model.source.prior.max() > 0.11


def test_the_two_shifts_differ_in_their_class_mix_only(shift: Callable[[str], Shift]) -> None:
    even, uneven = (np.bincount(shift(name).labels[1], minlength=10) for name in DIGITS)
    assert set(even) == {20}
    assert sorted(uneven) == [5] * 8 + [80] * 2
    assert shift("domain").model.content_hash == shift("domain_label").model.content_hash


def test_the_carried_digits_are_small(digits: Path) -> None:
    assert sum(path.stat().st_size for path in digits.rglob("*")) < 2e6


def test_a_folder_of_something_else_is_refused_with_what_is_expected(carried: Path) -> None:
    with pytest.raises(BenchError, match=r"lacks model.safetensors and 2 more; expected .*<shift>.npz"):
        load_digits(carried, "domain")


@pytest.mark.parametrize("record", ["{}", '{"domain": {"none": "good"}}', "[]"])
def test_a_record_of_something_else_is_refused(record: str, copied: Path) -> None:
    (copied / "accuracy.json").write_text(record)
    with pytest.raises(BenchError, match="does not describe the shift 'domain'"):
        load_digits(copied, "domain")


def test_only_the_folders_that_are_needed_are_looked_for(carried: Path, digits: Path, tmp_path: Path) -> None:
    Folders(tmp_path, digits).check(DIGITS)
    Folders(carried, tmp_path).check(["label"])
    with pytest.raises(BenchError, match="is no benchmark folder"):
        Folders(carried, tmp_path).check(SHIFTS)


def test_the_tool_keeps_every_other_client_and_all_recorded_accuracies(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1) * np.ones((1, 30, 28, 28), np.uint8)
    for name in DIGITS:
        np.savez(copied / f"{name}.npz", images=images, labels=np.zeros((20, 30), np.int64))
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("make_digits_data")
    monkeypatch.setattr("sys.argv", ["make_digits_data", str(copied), "--output", str(tmp_path / "reduced")])
    tool.main()
    reduced = load_digits(tmp_path / "reduced", "domain")
    assert reduced.images[:, 0, 0, 0].tolist() == list(reduced.clients) == list(range(0, 20, 2))
    assert len(reduced.recorded["none"].accuracy) == 20
    assert "Attribution 4.0" in (tmp_path / "reduced" / "LICENSE.txt").read_text()
