"""`acclimate models add-moments`, from labelled images in a file to a bundle that `balanced` can be served with."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from acclimate_adapters import Source, create, require
from acclimate_adapters.balanced.moments import source_moments
from acclimate_store import BundleKey, Catalogue, Manifest, ManifestError, MomentsError, SampleError, write_bundle
from acclimate_store.cli import add_parser
from acclimate_store.labelled import labelled_images
from acclimate_store.versions import next_version

ROWS = 300  # more than two passes
SHAPE = (1, 28, 28)


WITHOUT_BATCH_NORM = """
from torch import nn


class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 3))
"""


@pytest.fixture
def acclimate(store: Path) -> Callable[..., int]:
    parser = argparse.ArgumentParser(prog="acclimate")
    add_parser(parser.add_subparsers(required=True), default_store=store)

    def run(*words: str | Path) -> int:
        arguments = parser.parse_args(list(map(str, words)))
        code: int = arguments.run(arguments)
        return code

    return run


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = np.arange(ROWS) % 3
    images = generator.integers(0, 200, (ROWS, *SHAPE), dtype=np.uint8) + labels[:, None, None, None].astype(np.uint8)
    return {"images": images, "labels": labels}


@pytest.fixture
def data(tmp_path: Path, arrays: Mapping[str, np.ndarray]) -> Callable[..., Path]:
    """A file of labelled images with some arrays changed, or left out by None."""

    def save(**changes: Any) -> Path:
        path = tmp_path / "labelled.npz"
        np.savez_compressed(path, **{k: v for k, v in {**arrays, **changes}.items() if v is not None})
        return path

    return save


def test_the_new_version_is_the_old_one_with_the_moments_of_the_data(
    acclimate: Callable[..., int], store: Path, data: Callable[..., Path], arrays: Mapping[str, np.ndarray], capsys: Any
) -> None:
    assert acclimate("models", "add-moments", "tiny", "--data", data()) == 0
    assert capsys.readouterr().out == "tiny/2: published with class moments\n"
    old, new = (Catalogue(store).load("tiny", version) for version in ("1", "2"))
    expected = source_moments(
        old.model, [(old.prepare(arrays["images"]), torch.from_numpy(arrays["labels"].astype(np.int64)))]
    )
    assert new.model.source.moments.keys() == expected.keys()
    for name, moment in expected.items():
        torch.testing.assert_close(new.model.source.moments[name], moment, rtol=1e-6, atol=1e-6)
    before, after = (
        {n: t for n, t in b.model.source.tensors().items() if not n.startswith("moments")} for b in (old, new)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert new.model.source.rates == old.model.source.rates
    assert all(torch.equal(old.model.tensor(name), new.model.tensor(name)) for name in old.model.modules)
    require(create("balanced"), new.model)


def test_files_and_manifest_are_kept_and_say_where_the_moments_come_from(
    acclimate: Callable[..., int], store: Path, data: Callable[..., Path]
) -> None:
    acclimate("models", "add-moments", "tiny/1", "--data", data(), "--as", "1-balanced")
    old, new = (Catalogue(store).manifest("tiny", version) for version in ("1", "1-balanced"))
    assert (store / "tiny/1-balanced/notes/README.txt").read_bytes() == b"hello"
    assert (
        new.provenance == f"random weights Class moments of tiny/1 measured on {ROWS} labelled images of labelled.npz."
    )
    kept = {"name", "architecture", "classifier", "input", "classes", "metrics", "licence"}
    assert old.model_dump(include=kept) == new.model_dump(include=kept)


def test_floats_from_0_to_1_do_as_well(acclimate: Callable[..., int], store: Path, data: Callable[..., Path]) -> None:
    acclimate("models", "add-moments", "tiny", "--data", data())
    floats = data(images=np.load(data())["images"].astype(np.float32) / np.float32(255))
    acclimate("models", "add-moments", "tiny", "--data", floats)
    first, second = (Catalogue(store).load("tiny", version).model.source.moments for version in ("2", "3"))
    for name, moment in first.items():
        torch.testing.assert_close(second[name], moment, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": None}, "array labels is missing"),
        ({"images": None}, "array images is missing"),
        ({"images": np.zeros((ROWS, 28, 28), np.uint8)}, r"the model takes images \[N, 1, 28, 28\], these are"),
        ({"images": np.zeros((ROWS, 1, 28, 28))}, "uint8 .* or float32 .*, not float64"),
        ({"images": np.zeros((ROWS, *SHAPE), np.uint8, order="F")}, "Fortran order"),
        ({"labels": np.zeros(ROWS)}, "labels are integers, not float64"),
        ({"labels": np.zeros(ROWS - 1, np.int64)}, "one label per image"),
        ({"images": np.zeros((0, *SHAPE), np.uint8), "labels": np.zeros(0, np.int64)}, "at least one image"),
        ({"labels": np.arange(ROWS) % 4}, "int64, from 0 to 2; these run from 0 to 3"),
        ({"labels": np.arange(ROWS) % 2}, r"there are none of class \[2\]"),
        ({"images": np.full((ROWS, *SHAPE), np.nan, np.float32)}, "NaN or infinite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_does_not_do_is_refused_with_the_reason_and_nothing_is_published(
    changes: Mapping[str, Any],
    reason: str,
    acclimate: Callable[..., int],
    data: Callable[..., Path],
    store: Path,
    capsys: Any,
) -> None:
    assert acclimate("models", "add-moments", "tiny", "--data", data(**changes)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    with pytest.raises(MomentsError, match=reason):
        raise MomentsError(captured.err)
    assert [path.name for path in (store / "tiny").iterdir()] == ["1"]


@pytest.mark.parametrize("content", [None, b"", b"no archive at all"])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SampleError, match=r"cannot be read as an \.npz file without pickle"):
        labelled_images(path, SHAPE)


def test_pickled_objects_are_refused(data: Callable[..., Path]) -> None:
    with pytest.raises(SampleError, match="labels are integers, not object"):
        labelled_images(data(labels=np.array([{}] * ROWS)), SHAPE)


def test_damage_that_shows_only_later_is_refused(data: Callable[..., Path]) -> None:
    path = data()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SampleError, match="cannot be read"):
        list(labelled_images(path, SHAPE).batches(64))


def test_only_one_batch_is_in_memory_at_a_time(data: Callable[..., Path], arrays: Mapping[str, np.ndarray]) -> None:
    seen = list(labelled_images(data(), SHAPE).batches(128))
    assert [len(labels) for _, labels in seen] == [128, 128, 44]
    np.testing.assert_array_equal(np.concatenate([images for images, _ in seen]), arrays["images"])
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in seen]), arrays["labels"])


def test_a_version_that_exists_is_refused_before_anything_is_measured(
    acclimate: Callable[..., int], data: Callable[..., Path], capsys: Any
) -> None:
    every_class_but_one = data(labels=np.zeros(ROWS, np.int64))
    assert acclimate("models", "add-moments", "tiny", "--data", every_class_but_one, "--as", "1") == 2
    assert "tiny/1 is published already" in capsys.readouterr().err


def test_a_model_without_batch_norm_is_told_that_it_needs_no_moments(
    acclimate: Callable[..., int],
    store: Path,
    manifest: Manifest,
    data: Callable[..., Path],
    capsys: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "net_without_batch_norm.py").write_text(WITHOUT_BATCH_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    architecture = "net_without_batch_norm:Flat"
    changes = {"name": "flat", "architecture": architecture, "architecture_options": {}, "classifier": "1"}
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
    source = Source(prior=torch.full((3,), 1 / 3))
    write_bundle(store, manifest.model_copy(update=changes), net, source, allowed_imports=[architecture])
    assert acclimate("models", "add-moments", "flat", "--data", data(), "--allow-import", architecture) == 2
    assert "there is nothing to add: 'balanced' corrects its class prior" in capsys.readouterr().err


def test_the_next_version_raises_the_last_number() -> None:
    assert [next_version(BundleKey("m", v)) for v in ("1", "9", "1.9", "v2-rc9")] == ["2", "10", "1.10", "v2-rc10"]
    with pytest.raises(ManifestError, match="name the new version with --as"):
        next_version(BundleKey("m", "final"))
