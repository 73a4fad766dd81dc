"""Clients that choose no adapter get one that has helped held-out clients, else the safest where it can serve, or none:
the operator alone overrides."""

import json
import shutil
from pathlib import Path

import pytest

from acclimate_adapters import Source
from acclimate_service.cli import main
from acclimate_store import Catalogue, ManifestError, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import load_weights

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


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory):
    """A store with the shipped model, whose source holds the classes' shares and nothing else."""
    bundle = Catalogue(SHIPPED).load("fashion-cnn")
    net = build(bundle.manifest.architecture, bundle.manifest.architecture_options)
    load_weights(net, SHIPPED / "fashion-cnn/1")
    store = tmp_path_factory.mktemp("unmeasured")
    write_bundle(
        store, bundle.manifest.model_copy(update={"evidence": None}), net, Source(prior=bundle.model.source.prior)
    )
    return store


@pytest.mark.parametrize(("change", "reason"), NOT_EARNED.values(), ids=NOT_EARNED)
def test_without_a_proven_gain_the_safest_adapter_answers(change, reason, store_with, make_replica, stream):
    replica = make_replica(model_store=store_with(change))
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("consensus", "no_labels")
    assert model["default_adapter"]["reason"].startswith(f"it hardly harms anybody, and {reason}")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "consensus"
        assert client.configure("other", "atp").adapter == "atp", "who asks for it gets it"


@pytest.mark.parametrize("change", [HARMFUL, UNCERTAIN], ids=["harm", "a gain that may be none"])
def test_labels_that_speak_against_the_safest_adapter_leave_nobody_adapted(change, store_with, make_replica, stream):
    replica = make_replica(model_store=store_with({**change, "adapter": "consensus"}))
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("none", "evidence")
    assert model["default_adapter"]["reason"].startswith("of consensus its gain of ")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "none"


def test_too_few_clients_speak_neither_for_nor_against_it(store_with, make_replica):
    replica = make_replica(model_store=store_with({"adapter": "consensus", **FEW}))
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("consensus", "no_labels")


def test_a_model_whose_layers_were_not_measured_adapts_nobody_unasked(unmeasured, make_replica, stream):
    replica = make_replica(model_store=unmeasured)
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("none", "not_servable")
    assert model["default_adapter"]["reason"].startswith(
        "consensus cannot be served, and no gain was shown on clients that were held out; run "
    )
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "none"


def test_an_operator_who_does_not_offer_it_adapts_nobody_unasked(store_with, make_replica, stream):
    replica = make_replica(model_store=store_with(None), adapters=("none", "atp"))
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("none", "not_servable")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "none"


def test_the_command_says_the_same_without_building_the_network(store_with, unmeasured, monkeypatch, capsys):
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(store_with(None)))
    assert main(["models", "show", "fashion-cnn"]) == 0
    assert capsys.readouterr().err.startswith("default adapter: consensus, because: no_labels; it hardly harms anybody")
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(unmeasured))
    assert main(["models", "show", "fashion-cnn"]) == 0
    assert capsys.readouterr().err.startswith(
        "default adapter: none, because: not_servable; consensus cannot be served, and no gain was shown"
    )


def test_a_proven_gain_is_the_default_and_said_to_be(store_with, make_replica, stream):
    replica = make_replica(model_store=store_with({}))
    (model,) = replica.http.get("/models").json()["models"]
    assert (model["default_adapter"]["name"], model["default_adapter"]["because"]) == ("atp", "evidence")
    assert model["default_adapter"]["reason"].startswith("+5.5 points (+4.1 to +7.0) on 40 ")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "atp"


def test_an_operator_may_override_what_is_not_proven(store_with, make_replica, stream):
    replica = make_replica(model_store=store_with(HARMFUL), adapter="atp")
    with replica.sdk() as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "atp"


def test_hyper_parameters_that_were_chosen_for_the_model_are_those_of_whoever_says_nothing_else(
    store_with, make_replica
):
    store = store_with({})
    file = store / "fashion-cnn/1/manifest.json"
    told = json.loads(file.read_text())
    chosen = {"beta": 0.1, "lr": 0.01}
    told["settings"] = {"fedthe": told["evidence"] | {"adapter": "fedthe", "options": chosen}}
    file.write_text(json.dumps(told))
    replica = make_replica(model_store=store)
    adapters = {each["name"]: each for each in replica.http.get("/adapters").json()["adapters"]}
    shown = adapters["fedthe"]["hyperparameters"]["properties"]
    assert {name: shown[name]["default"] for name in ("beta", "lr", "alpha")} == {**chosen, "alpha": 0.1}
    with replica.sdk() as client:
        assert client.configure("plain", "fedthe").hyperparameters == chosen
        assert client.configure("partly", "fedthe", beta=0.5).hyperparameters == {"beta": 0.5, "lr": 0.01}
        assert client.configure("papers", "fedthe", beta=0.3, lr=0.1).hyperparameters == {}
        assert client.get("papers").hyperparameters == {}
    by_variable = make_replica(model_store=store, adapter="fedthe", candidates=("fedthe",), guard="adapt")
    with by_variable.sdk() as client:
        assert client.configure("other", "fedthe").hyperparameters == chosen
    assert by_variable.service.configurations.describe("")["hyperparameters"] == chosen


def test_settings_of_an_adapter_are_about_it(store_with):
    store = store_with({})
    file = store / "fashion-cnn/1/manifest.json"
    told = json.loads(file.read_text())
    told["settings"] = {"fedthe": told["evidence"]}
    file.write_text(json.dumps(told))
    with pytest.raises(ManifestError, match="settings of fedthe are about another adapter"):
        Catalogue(store).manifest("fashion-cnn")
