"""Recorded clients, for all tests that speak to a service."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from acclimate_store.samples import load_streams

STREAMS = Path(__file__).parents[1] / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
Images = NDArray[np.uint8]


@pytest.fixture(scope="session")
def labelled() -> Callable[[int, int], tuple[Images, NDArray[np.int64]]]:
    """The first images of one recorded client, with their labels."""
    streams = load_streams(STREAMS)
    return lambda client, number: (streams[client].images[:number], streams[client].labels[:number].astype(np.int64))


@pytest.fixture(scope="session")
def stream() -> Callable[..., list[Images]]:
    """Batches of one recorded client, over and over."""
    streams = load_streams(STREAMS)

    def batches(client: int, number: int, size: int = 10) -> list[Images]:
        images = streams[client].images
        return [images.take(range(i * size, (i + 1) * size), axis=0, mode="wrap") for i in range(number)]

    return batches
