"""Bundles and batches that several benchmarks are made with."""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from acclimate_store import load_streams

_STORE: Final = Path(__file__).parents[3] / "model_store"
BUNDLES: Final = _STORE / "bundles"
SAMPLES: Final = _STORE / "samples/fashion-hybrid/streams.npz"


def fashion(images: int = 20) -> NDArray[np.uint8]:
    """A batch of one client of the bundled model, uint8 [B, 1, 28, 28]."""
    batch: NDArray[np.uint8] = load_streams(SAMPLES)[0].images[:images]
    return batch


def noise(*shape: int) -> NDArray[np.uint8]:
    """A batch of random images, uint8 [20, C, H, W]."""
    return np.random.default_rng(1).integers(0, 256, (20, *shape), np.uint8)
