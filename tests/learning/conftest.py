"""A small network that clients can be simulated for in no time."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from acclimate_learning.clients import Pool
from acclimate_store import Bundle, Catalogue, load_streams

SHIPPED = Path(__file__).parents[2] / "model_store"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model store of one's own, which the command has."""
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(tmp_path / "store"))
    shutil.copytree(SHIPPED / "bundles/fashion-cnn", tmp_path / "store/fashion-cnn")
    return tmp_path / "store"


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    return Catalogue(SHIPPED / "bundles").load("fashion-cnn", "1")


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Fashion images that somebody labelled, 1600 of them."""
    streams = load_streams(SHIPPED / "samples/fashion-hybrid/streams.npz")
    owners = [stream.client_id for stream in streams for _ in stream.labels]
    images, labels = (np.concatenate([getattr(s, name) for s in streams]) for name in ("images", "labels"))
    return Pool(images, labels, np.array(owners))


@pytest.fixture
def data(pool: Pool, tmp_path: Path) -> Callable[..., Path]:
    """The same in a file."""

    def save() -> Path:
        np.savez(tmp_path / "data.npz", images=pool.images, labels=pool.labels, owners=pool.owners)
        return tmp_path / "data.npz"

    return save
