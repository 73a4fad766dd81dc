"""Stored states that take a share of their bytes: what a client notices when it is evicted, handed over, exported."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from acclimate_adapters import State, create
from acclimate_adapters.compression.coding import decode, encode
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_service.settings import SettingsError, read_settings
from acclimate_store import BundleKey, Catalogue
from acclimate_store.manifest import STATE_BUDGET, StateBudget
from acclimate_store.versions import publish, renewed

BUNDLES = Path(__file__).parents[3] / "model_store/bundles"
CLOSE = 0.02
"""Most that a probability may differ from an uninterrupted run's at the default budget, stored after every batch."""


def stored(replica, client):
    """Bytes in Redis of all that is known of a client, its markers and answers included."""
    return sum(len(replica.redis.dump(key)) for key in replica.keys(client))


def far(answers, expected):
    return max(np.abs(one - other).max() for one, other in zip(answers, expected, strict=True))


def test_the_default_budget_is_at_most_a_quarter():
    assert 0 < STATE_BUDGET <= 0.25


@pytest.mark.parametrize(("setting", "expected"), [(None, 1 / 16), (0.25, 0.25)], ids=["learned", "set"])
def test_what_was_learned_for_the_bundle_is_the_budget_unless_the_operator_sets_one(
    make_replica, tmp_path, stream, setting, expected
):
    store = tmp_path / "store"
    shutil.copytree(BUNDLES / "fashion-cnn", store / "fashion-cnn")
    catalogue = Catalogue(store)
    learned = {"atp": StateBudget(budget=1 / 16, nbytes=1, other=0, lost=0, of="clients")}
    key = BundleKey("fashion-cnn", "2")
    manifest = renewed(catalogue, catalogue.manifest("fashion-cnn"), key, "", state_budgets=learned)
    publish(catalogue, BundleKey("fashion-cnn", "1"), manifest, catalogue.load("fashion-cnn").model.source, {})
    replica = make_replica(model_store=store, model="fashion-cnn/2", state_budget=setting, journal=False, cache_bytes=0)
    with replica.sdk() as sdk:
        sdk.predict("cam", stream(1, 1)[0])
    exact = create("atp").init(replica.service.bundle.model).nbytes
    assert 0.8 * expected < stored(replica, "cam") / exact < expected + 0.03


@pytest.mark.parametrize("value", ["0", "-1", "1.01", "much"])
def test_a_budget_outside_0_to_1_is_refused(monkeypatch, value):
    monkeypatch.setenv("ACCLIMATE_STATE_BUDGET", value)
    with pytest.raises(SettingsError, match="ACCLIMATE_STATE_BUDGET: .*" + value):
        read_settings()


@pytest.mark.parametrize("journal", [True, False], ids=["by journal", "whole"])
def test_clients_that_are_evicted_all_the_time_are_answered_as_if_they_were_not(make_replica, serial, stream, journal):
    replica = make_replica(cache_bytes=0, state_budget=STATE_BUDGET, journal=journal)
    batches = stream(1, 8)
    with replica.sdk() as sdk:
        predictions = [sdk.predict("cam", images, probabilities=True) for images in batches]
    assert {each.state.status for each in predictions[1:]} == {"restored"}
    difference = far([each.probabilities for each in predictions], serial.probabilities("atp", batches))
    assert 0 < difference < CLOSE


def test_a_snapshot_takes_no_more_than_the_budget_and_the_next_replica_goes_on_from_it(
    run_service, make_replica, serial, stream, tmp_path
):
    redis = make_replica().service.settings.redis_url
    batches = stream(2, 6)
    with run_service(data_dir=tmp_path, redis_url=redis, state_budget=STATE_BUDGET) as first, first.sdk() as sdk:
        for images in batches[:5]:
            sdk.predict("cam", images)
    second = make_replica(redis_url=redis, state_budget=STATE_BUDGET)
    exact = create("atp").init(serial.bundle.model).nbytes
    assert 0.8 * STATE_BUDGET < stored(second, "cam") / exact < STATE_BUDGET + 0.03
    with second.sdk() as sdk:
        prediction = sdk.predict("cam", batches[5], probabilities=True)
    assert (prediction.state.status, prediction.state.version) == ("restored", 6)
    assert far([prediction.probabilities], serial.probabilities("atp", batches)[5:]) < CLOSE


def test_replicas_with_other_budgets_read_what_each_other_wrote(make_replica, serial, stream):
    first = make_replica(journal=False, state_budget=0.25, cache_bytes=0)
    url = first.service.settings.redis_url
    fleet = [first, *(make_replica(redis_url=url, journal=False, state_budget=b, cache_bytes=0) for b in (1.0, 0.125))]
    batches, answers = stream(3, 9), []
    for number, images in enumerate(batches):
        with fleet[number % 3].sdk() as sdk:
            answers.append(sdk.predict("cam", images, probabilities=True).probabilities)
    assert far(answers, serial.probabilities("atp", batches)) < CLOSE


def test_an_export_of_a_coded_client_is_an_exact_state_that_every_import_takes(make_replica, stream):
    replica = make_replica(cache_bytes=0, journal=False, state_budget=STATE_BUDGET)
    (*first, last) = stream(0, 4)
    with replica.sdk() as sdk:
        for images in first:
            sdk.predict("giver", images)
        data = sdk.export_state("giver")
        assert State.from_bytes(data).adapter == "atp"
        sdk.import_state("taker", data)
        given, taken = (sdk.predict(name, last, probabilities=True).probabilities for name in ("giver", "taker"))
    assert far([given], [taken]) < CLOSE


def test_a_coded_state_is_no_import(make_replica, serial, stream, assert_problem):
    replica, atp, model = make_replica(), create("atp"), serial.bundle.model
    state = atp.step(model, atp.init(model), serial.bundle.prepare(stream(0, 1)[0])).state
    data = encode(state, STATE_BUDGET, sensitivity(atp, model))
    reply = replica.http.put("/clients/cam/state", content=data)
    assert "coded.3:atp" in assert_problem(reply, 409, "state_mismatch")["detail"]
    assert replica.http.put("/clients/cam/state", content=decode(data).to_bytes()).status_code == 200
