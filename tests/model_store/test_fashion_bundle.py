"""The bundle and the sample streams that the project ships."""

from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_adapters import create
from acclimate_store import Bundle, Catalogue, ClientStream, load_streams

STORE = Path(__file__).resolve().parents[2] / "model_store"
STREAMS = STORE / "samples" / "fashion-hybrid" / "streams.npz"
BATCH = 20

# Accuracy of the reference programs on these eight clients.
REFERENCE = {
    "none": [0.535, 0.835, 0.825, 0.815, 0.81, 0.83, 0.72, 0.745],
    "atp": [0.505, 0.87, 0.875, 0.845, 0.86, 0.895, 0.85, 0.785],
}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Catalogue(STORE / "bundles").load("fashion-cnn")


@pytest.fixture(scope="module")
def streams() -> tuple[ClientStream, ...]:
    return load_streams(STREAMS)


def accuracy(bundle: Bundle, stream: ClientStream, adapter_name: str) -> float:
    adapter = create(adapter_name)
    state, correct = adapter.init(bundle.model), 0
    for start in range(0, len(stream.images), BATCH):
        rows = slice(start, start + BATCH)
        step = adapter.step(bundle.model, state, bundle.prepare(stream.images[rows]))
        state = step.state
        correct += int((step.logits.argmax(dim=1).numpy() == stream.labels[rows]).sum())
    return correct / len(stream.images)


def test_the_shipped_bundle_has_no_problems() -> None:
    assert Catalogue(STORE / "bundles").verify("fashion-cnn") == ()


def test_the_shipped_bundle_carries_what_the_methods_need(bundle: Bundle) -> None:
    assert bundle.model.source.present == {"prior", "rates", "confusion", "prototypes", "descriptor", "moments"}
    assert len(bundle.model.source.rates or {}) == 23
    assert torch.equal(bundle.model.source.prior, torch.full((10,), 0.1))
    assert bundle.manifest.classes[0] == "T-shirt/top"


@pytest.mark.parametrize("method", REFERENCE)
def test_accuracy_on_the_sample_is_that_of_the_reference(
    method: str, bundle: Bundle, streams: tuple[ClientStream, ...]
) -> None:
    measured = [accuracy(bundle, stream, method) for stream in streams]
    one_flip = 1 / len(streams[0].images)
    np.testing.assert_allclose(measured, REFERENCE[method], rtol=0, atol=one_flip + 1e-9)


def test_the_sample_meets_every_corruption_in_batches_of_real_images(streams: tuple[ClientStream, ...]) -> None:
    assert {stream.corruption for stream in streams} == {"speckle_noise", "gaussian_blur", "spatter", "gamma"}
    assert all(stream.images.shape == (200, 1, 28, 28) for stream in streams)
    assert all(np.bincount(stream.labels, minlength=10).max() == 80 for stream in streams)


def test_bundle_and_samples_stay_small_enough_for_the_repository() -> None:
    files = [p for folder in ("bundles", "samples") for p in (STORE / folder).rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 4_000_000
