"""A service on ONNX Runtime: it answers like torch, says what computes, and never takes torch where it must not."""

import numpy as np
import pytest

from acclimate_service.cli import main
from acclimate_store import GraphError


@pytest.mark.parametrize("adapter", ["none", "fedcal", "balanced", "consensus", "atp"])
def test_answers_are_those_of_torch(adapter, make_replica, post, serial, stream):
    replica = make_replica(adapter=adapter, runtime="onnx")
    batches = stream(0, 5, size=20)
    answers = [post(replica, "cam", images, "?probabilities=true").json()["probabilities"] for images in batches]
    np.testing.assert_allclose(answers, serial.probabilities(adapter, batches), atol=1e-4)


@pytest.mark.parametrize(("runtime", "name"), [("auto", "onnxruntime"), ("onnx", "onnxruntime"), ("torch", "torch")])
def test_the_model_is_described_with_what_computes(runtime, name, make_replica):
    replica = make_replica(runtime=runtime)
    assert replica.http.get("/models").json()["models"][0]["runtime"].split()[0] == name
    engine = replica.service.engine._machine.engine
    assert engine.startswith("cpu ")
    assert " torch " in engine, "gradients are torch's in any case"
    assert ("onnxruntime" in engine) == (name == "onnxruntime")
    assert len(engine.encode()) <= 255


def test_a_bundle_without_graphs_is_refused_for_onnx_and_served_by_torch_else(make_replica, anchored_store):
    with pytest.raises(GraphError, match=r"it carries no frozen\.onnx; `acclimate models add-onnx` publishes"):
        make_replica(model_store=anchored_store, runtime="onnx")
    served = make_replica(model_store=anchored_store, runtime="auto")
    assert served.http.get("/models").json()["models"][0]["runtime"].startswith("torch ")


def test_the_command_says_why_it_cannot_serve_by_onnx(anchored_store, tmp_path, monkeypatch, capsys):
    settings = {"RUNTIME": "onnx", "MODEL_STORE": anchored_store, "DATA_DIR": tmp_path, "PORT": 0}
    for name, value in settings.items():
        monkeypatch.setenv(f"ACCLIMATE_{name}", str(value))
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("acclimate: ONNX Runtime cannot serve this bundle: it carries no frozen.onnx")
    assert said.count("\n") == 1


def test_a_runtime_that_there_is_not_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("ACCLIMATE_RUNTIME", "tensorrt")
    assert main(["serve"]) == 2
    assert "ACCLIMATE_RUNTIME: Input should be 'auto', 'onnx' or 'torch', not 'tensorrt'" in capsys.readouterr().err


def test_the_memory_layout_is_reported_and_the_same_on_all_replicas_under_strict_replay(make_replica):
    for strict in (False, True):
        replica = make_replica(strict_replay=strict)
        layout = replica.http.get("/models").json()["models"][0]["layout"]
        assert layout == "contiguous" if strict else layout.startswith(("contiguous", "channels_last"))
        assert ("channels_last" in replica.service.engine._machine.engine) == ("channels_last" in layout)
