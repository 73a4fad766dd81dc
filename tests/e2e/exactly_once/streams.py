"""What clients send, and what an uninterrupted run in this process answers."""

from collections.abc import Iterable, Iterator

import numpy as np
from exactly_once.processes import ROOT
from numpy.typing import NDArray

from acclimate_adapters import State, create, guarded_step
from acclimate_store import Bundle, Catalogue, load_streams

Images = NDArray[np.uint8]
SIZE = 10


def load_bundle() -> Bundle:
    return Catalogue(ROOT / "model_store/bundles").load("fashion-cnn")


def batches(client: int, number: int) -> list[Images]:
    """Batches of one recorded client, from a place of its own in it."""
    streams = load_streams(ROOT / "model_store/samples/fashion-hybrid/streams.npz")
    images = streams[client % len(streams)].images
    first = client // len(streams) * SIZE // 2
    return [images.take(range(first + i * SIZE, first + (i + 1) * SIZE), axis=0, mode="wrap") for i in range(number)]


def serial(bundle: Bundle, adapter: str, batches: Iterable[Images]) -> Iterator[NDArray[np.float64]]:
    """Probabilities of each batch, one after the other."""
    state = create(adapter).init(bundle.model)
    for images in batches:
        state, probabilities = step(bundle, adapter, state, images)
        yield probabilities


def step(bundle: Bundle, adapter: str, state: State, images: Images) -> tuple[State, NDArray[np.float64]]:
    """The state after one more batch, and the batch's probabilities."""
    done = guarded_step(create(adapter), bundle.model, state, bundle.prepare(images))
    return done.state, done.logits.double().softmax(dim=-1).numpy()
