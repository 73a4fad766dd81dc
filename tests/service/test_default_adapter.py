"""Clients that choose no adapter get one that has helped held-out clients, or none: the operator alone overrides."""

import json
import shutil
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "model_store/bundles"

HARMFUL = {"gain": -0.028, "low": -0.041, "high": -0.015, "worst": -0.115, "harmed": 0.4}
UNCERTAIN = {"gain": 0.01, "low": -0.002, "high": 0.022}
UNEQUAL = {"harmed": 0.075, "worst": -0.04}
FEW = {"clients": 4}
NOT_EARNED = {
    "harm": (HARMFUL, "of atp its gain of -2.8 points may be none (-4.1 to -1.5); run `acclimate evaluate fashion-cnn"),
    "a gain that may be none": (UNCERTAIN, "of atp its gain of +1.0 points may be none (-0.2 to +2.2); run `acclimate"),
    "harm to some": (UNEQUAL, "of atp it harms 8 % of the clients, the worst by 4.0 points; run `acclimate evaluate"),
    "too few clients": (FEW, "of atp it was judged on 4 clients, and 5 are the least; run `acclimate evaluate"),
    "no evidence": (None, "no gain was shown on clients that were held out; run `acclimate learn fashion-cnn` or"),
}


@pytest.fixture
def store_with(tmp_path):
    """A store with the shipped model, whose rates have shown something else on held-out clients."""

    def make(change):
        folder = tmp_path / "store/fashion-cnn/1"
        shutil.copytree(SHIPPED / "fashion-cnn/1", folder)
        told = json.loads((folder / "manifest.json").read_text())
        told["evidence"] = None if change is None else told["evidence"] | change
        (folder / "manifest.json").write_text(json.dumps(told))
        return tmp_path / "store"

    return make


@pytest.mark.parametrize(("change", "reason"), NOT_EARNED.values(), ids=NOT_EARNED)
def test_without_a_proven_gain_nobody_is_adapted_unasked(change, reason, store_with, make_replica, stream):
    replica = make_replica(model_store=store_with(change))
    (model,) = replica.http.get("/models").json()["models"]
    assert model["default_adapter"]["name"] == "none"
    assert model["default_adapter"]["reason"].startswith(reason)
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "none"
        assert client.configure("other", "atp").adapter == "atp", "who asks for it gets it"


def test_a_proven_gain_is_the_default_and_said_to_be(store_with, make_replica, stream):
    replica = make_replica(model_store=store_with({}))
    (model,) = replica.http.get("/models").json()["models"]
    assert model["default_adapter"]["name"] == "atp"
    assert model["default_adapter"]["reason"].startswith("+5.5 points (+4.1 to +7.0) on 40 ")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "atp"


def test_an_operator_may_override_what_is_not_proven(store_with, make_replica, stream):
    replica = make_replica(model_store=store_with(HARMFUL), adapter="atp")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "atp"
