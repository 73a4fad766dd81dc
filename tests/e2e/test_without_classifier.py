"""A network whose answer no layer gives that adapters could look into, from its weights to predictions."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_client import Client, ProblemError
from acclimate_service.cli import main
from acclimate_store import load_streams

SHIPPED = Path(__file__).parents[2] / "model_store"
NETWORK = """
from acclimate_store.shallow_cnn import ShallowCNN

class Tempered(ShallowCNN):
    def forward(self, x):
        return super().forward(x) / 1.5
"""
SMALL = ("--teachers", "3", "--judges", "5", "--teacher-images", "20", "--judge-images", "20")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the module of the network and labelled images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", "store")
    monkeypatch.delitem(sys.modules, "tempered", raising=False)
    Path("tempered.py").write_text(NETWORK)
    streams = load_streams(SHIPPED / "samples/fashion-hybrid/streams.npz")
    images, labels = (np.concatenate([getattr(each, name) for each in streams]) for name in ("images", "labels"))
    np.savez("data.npz", images=images, labels=labels)
    return tmp_path


@pytest.mark.slow
def test_it_is_created_measured_learned_for_evaluated_and_served(
    folder: Path, serve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    weights, trust = SHIPPED / "bundles/fashion-cnn/1/model.safetensors", ("--allow-import", "tempered:Tempered")
    create = ["models", "create", "mine", "--arch", "tempered:Tempered", "--weights", str(weights)]
    assert main([*create, "--classes", ",".join("abcdefghij"), "--mean", "0.286", "--std", "0.353"]) == 0
    assert "classifier  none, 10 classes" in capsys.readouterr().out
    assert main(["models", "measure", "mine", "--data", "data.npz", *trust]) == 0
    out = capsys.readouterr().out
    assert "no prototypes and no descriptor: the network ends in no classifier" in out
    assert "no ONNX graphs" not in out
    words = ("--data", "data.npz", "--rounds", "1", "--lr", "0.01", *SMALL, "--no-onnx", *trust)
    assert main(["learn", "mine", *words, "--tune", "fedthe"]) == 2
    assert "--tune: fedthe needs classifier, descriptor, which the bundle does not have" in capsys.readouterr().err
    assert main(["learn", "mine", *words, "--tune", "surgical"]) == 0
    assert "default adapter: none, because: not_servable; " in capsys.readouterr().out
    assert main(["evaluate", "mine", "--data", "data.npz", *SMALL, *trust]) == 0
    out = capsys.readouterr().out
    for lacking in ("t3a lacks linear_classifier", "shot lacks classifier", "fedthe lacks classifier, descriptor"):
        assert lacking in out
    judged = {line.split()[0] for line in out.splitlines() if line.endswith("kB")}
    assert judged >= {"surgical", "atp", "balanced", "bbse", "bn_adapt", "dynfed", "em", "fedcal", "tent", "atp+em"}
    assert "failed for" not in out

    service = serve(model_store="store", allowed_imports='["tempered:Tempered"]')
    assert service.adapters.startswith("acclimate: adapters atp, balanced, bbse, bn_adapt, dynfed, em, fedcal, ")
    assert "consensus lacks linear_classifier" in service.adapters
    assert "shot lacks classifier" in service.adapters
    assert ", surgical, " in service.adapters  # of the block that was chosen
    with np.load("data.npz") as data, Client(service.url) as client:
        batches, labels = np.split(data["images"][200:400], 10), data["labels"][200:400]
        assert client.predict("unchosen", batches[0]).adapter == "none"
        right = {}
        for adapter in ("none", "em", "atp", "bn_adapt"):
            client.configure(adapter, adapter)
            found = np.concatenate([client.predict(adapter, batch).indices for batch in batches])
            right[adapter] = (found == labels).mean()
            assert client.get(adapter).state.version > 10  # choosing the adapter counts, too
        assert right["none"] > 0.8
        assert right["em"] > right["none"]  # the client has two major classes
        with pytest.raises(ProblemError, match="classifier"):
            client.configure("other", "t3a")
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
    assert "default adapter: none, because: not_servable" in service.output
