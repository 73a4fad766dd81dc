from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_adapters import FrozenModel, Source
from acclimate_store import (
    Bundle,
    BundleError,
    BundleExists,
    InputSpec,
    IntegrityError,
    Manifest,
    ManifestError,
    TensorError,
    load_bundle,
    write_bundle,
)
from acclimate_store.architectures import build
from acclimate_store.shallow_cnn import ShallowCNN

TORCHVISION = {
    "resnet18": "fc",
    "mobilenet_v3_small": "classifier.3",
    "shufflenet_v2_x0_5": "fc",
    "mnasnet0_5": "classifier.1",
    "densenet121": "classifier",
}


@pytest.fixture(scope="module")
def bundle(published: Path) -> Bundle:
    return load_bundle(published / "tiny" / "1")


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 1, 28, 28), dtype=np.uint8)


def test_a_loaded_bundle_answers_as_the_network_that_was_written(
    bundle: Bundle, manifest: Manifest, net: ShallowCNN, source: Source, images: np.ndarray
) -> None:
    x = bundle.prepare(images)
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(bundle.model.frozen(x).logits, expected, rtol=0, atol=1e-6)
    direct = FrozenModel.from_module(net, classifier=manifest.classifier, source=source)
    assert torch.equal(bundle.model.frozen(x).logits, direct.frozen(x).logits)
    assert bundle.model.content_hash == direct.content_hash


def test_the_source_comes_back_bit_for_bit(bundle: Bundle, source: Source) -> None:
    loaded = bundle.model.source
    assert loaded.tensors().keys() == source.tensors().keys()
    assert all(torch.equal(loaded.tensors()[name], tensor) for name, tensor in source.tensors().items())
    assert loaded.rates == source.rates


def test_a_source_with_a_prior_alone_and_one_with_a_single_confusion_matrix_come_back(
    tmp_path: Path, manifest: Manifest, net: ShallowCNN
) -> None:
    prior = torch.full((3,), 1 / 3)
    for version, source in (("1", Source(prior=prior)), ("2", Source(prior=prior, confusion=torch.eye(3), rates={}))):
        path = write_bundle(tmp_path, manifest.model_copy(update={"version": version}), net, source)
        loaded = load_bundle(path).model.source
        assert loaded.present == source.present
        assert loaded.rates == source.rates


def test_prepare_normalises_by_the_manifest(bundle: Bundle, manifest: Manifest, images: np.ndarray) -> None:
    assert torch.equal(bundle.prepare(images), manifest.input.normalise(images))


def test_the_manifest_lists_every_other_file(published: Path, bundle: Bundle) -> None:
    directory = published / "tiny" / "1"
    there = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert there == {"manifest.json", *bundle.manifest.files}
    assert (directory / "notes" / "README.txt").read_bytes() == b"hello"


def test_writing_is_reproducible(
    published: Path, tmp_path: Path, manifest: Manifest, net: ShallowCNN, source: Source
) -> None:
    again = write_bundle(tmp_path, manifest, net, source, extra={"notes/README.txt": b"hello"})
    first = published / "tiny" / "1" / "manifest.json"
    assert (again / "manifest.json").read_bytes() == first.read_bytes()


def test_a_published_version_is_never_written_again(
    store: Path, manifest: Manifest, net: ShallowCNN, source: Source
) -> None:
    before = (store / "tiny" / "1" / "manifest.json").read_bytes()
    with pytest.raises(BundleExists, match="tiny/1 is published already and never changes; publish a new version"):
        write_bundle(store, manifest.model_copy(update={"licence": "MIT"}), net, source)
    assert (store / "tiny" / "1" / "manifest.json").read_bytes() == before


def test_of_two_writers_of_one_version_exactly_one_publishes(
    tmp_path: Path, manifest: Manifest, net: ShallowCNN, source: Source
) -> None:
    def publish(licence: str) -> str | None:
        try:
            write_bundle(tmp_path, manifest.model_copy(update={"licence": licence}), net, source)
        except BundleExists:
            return None
        return licence

    with ThreadPoolExecutor(2) as pool:
        winners = [licence for licence in pool.map(publish, ("MIT", "CC0-1.0")) if licence]
    assert winners == [load_bundle(tmp_path / "tiny" / "1").manifest.licence]
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["1"]


def test_what_cannot_be_loaded_is_not_published(tmp_path: Path, manifest: Manifest, net: ShallowCNN) -> None:
    with pytest.raises(TensorError, match=r"source\.prior has 2 classes, the network 3"):
        write_bundle(tmp_path, manifest, net, Source(prior=torch.tensor([0.5, 0.5])))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_outside_the_bundle_is_never_written(
    tmp_path: Path, manifest: Manifest, net: ShallowCNN, source: Source
) -> None:
    with pytest.raises(ManifestError, match=r"no '\.\.'"):
        write_bundle(tmp_path / "store", manifest, net, source, extra={"../../../escaped": b""})
    assert list(tmp_path.iterdir()) == []


def test_an_extra_file_cannot_replace_the_weights(
    tmp_path: Path, manifest: Manifest, net: ShallowCNN, source: Source
) -> None:
    path = write_bundle(tmp_path, manifest, net, source, extra={"model.safetensors": b"junk"})
    assert load_bundle(path).model.classes == 3


@pytest.mark.parametrize(("name", "classifier"), TORCHVISION.items())
def test_a_torchvision_classifier_is_written_loaded_and_served(
    name: str, classifier: str, tmp_path: Path, manifest: Manifest
) -> None:
    options = {"num_classes": 3}
    net = build(f"torchvision:{name}", options).eval()
    spec = InputSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
    draft = manifest.model_copy(
        update={
            "architecture": f"torchvision:{name}",
            "architecture_options": options,
            "classifier": classifier,
            "input": spec,
        }
    )
    bundle = load_bundle(write_bundle(tmp_path, draft, net, Source(prior=torch.full((3,), 1 / 3))))
    x = bundle.prepare(np.random.default_rng(1).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8))
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(bundle.model.frozen(x).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_empty_folder_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"is no bundle: it has no manifest\.json"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("error", [IntegrityError, ManifestError, TensorError])
def test_a_bundle_error_itemises_its_problems(error: type[BundleError]) -> None:
    assert error("bad:", ["one", "two"]).problems == ("one", "two")
    assert str(error("bad:", ["one", "two"])) == "bad:\n  one\n  two"
    assert error("alone").problems == ("alone",)
