"""A client that is answered and not adapted for a while: stored, seen everywhere, and left as it was."""

import numpy as np
import pytest

from acclimate_client import LabelledRow
from acclimate_client.errors import KeyReusedError

JOURNALS = pytest.mark.parametrize("inline_max", [1, 2**17], ids=["by journal", "whole"])


def same(prediction, expected):
    np.testing.assert_allclose(prediction.probabilities, expected, rtol=0, atol=1e-5)


@JOURNALS
def test_a_paused_client_is_answered_from_its_state_by_every_replica_until_it_goes_on(
    make_replica, serial, stream, inline_max
):
    first = make_replica(adapter="atp", inline_max=inline_max)
    url = first.service.settings.redis_url
    second = make_replica(adapter="atp", inline_max=inline_max, redis_url=url)
    one, two, three = stream(1, 3, 20)
    expected = serial.probabilities("atp", [one, two])
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        here.predict("cam", one)
        paused = there.pause("cam")
        assert (paused.adaptation, paused.adapter, paused.changed, paused.state.version) == ("paused", "atp", True, 2)
        late = make_replica(adapter="atp", inline_max=inline_max, redis_url=url)
        with late.sdk(max_retries=50) as restarted:
            for sdk in (here, there, restarted):
                prediction = sdk.predict("cam", two, probabilities=True)
                state = prediction.state
                assert (state.version, state.committed, state.adaptation) == (2, False, "paused")
                same(prediction, expected[1])
                sdk.predict("cam", three)
                assert sdk.get("cam").adaptation == "paused"
        assert not here.pause("cam").changed
        resumed = there.resume("cam")
        assert (resumed.adaptation, resumed.changed, resumed.state.version) == ("running", True, 3)
        assert here.get("cam").adaptation == "running"
        prediction = here.predict("cam", two, probabilities=True)
    assert (prediction.state.version, prediction.state.committed, prediction.state.adaptation) == (4, True, "running")
    same(prediction, expected[1])


def test_a_pause_is_kept_by_resets_and_other_adapters_and_ends_with_the_client(replica, serial, stream):
    one, two = stream(2, 2, 20)
    with replica.sdk() as sdk:
        sdk.predict("kept", one)
        sdk.pause("kept")
        sdk.reset("kept")
        assert sdk.predict("kept", one).state.adaptation == "paused"
        assert sdk.configure("kept", "em").adaptation == "paused"
        same(sdk.predict("kept", two, probabilities=True), serial.probabilities("em", [two])[0])
        assert sdk.get("kept").state.version == 4
        sdk.delete("kept")
        assert sdk.predict("kept", one).state.committed is True
        assert sdk.get("kept").adaptation == "running"


def test_a_client_nobody_has_seen_can_begin_paused(replica, serial, stream):
    (one,) = stream(3, 1, 20)
    with replica.sdk() as sdk:
        assert sdk.pause("asleep").state.version == 1
        same(sdk.predict("asleep", one, probabilities=True), serial.probabilities("atp", [one])[0])
        assert sdk.get("asleep").state.version == 1


def test_adapter_and_pause_can_be_told_at_once_and_what_is_left_out_stays(replica):
    def put(**body):
        reply = replica.http.put("/clients/both", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    told = put(adapter="em", hyperparameters={"steps": 3}, adaptation="paused")
    assert (told["adapter"], told["hyperparameters"], told["adaptation"]) == ("em", {"steps": 3}, "paused")
    told = put(adapter="bbse")
    assert (told["adapter"], told["adaptation"], told["changed"]) == ("bbse", "paused", True)
    told = put(adapter="bbse", adaptation="running")
    assert (told["adaptation"], told["changed"]) == ("running", True)
    told = put(adaptation="running")
    assert (told["adapter"], told["adaptation"], told["changed"]) == ("bbse", "running", False)


def test_a_repeated_pause_does_not_pause_again_and_a_batch_is_applied_once(replica, stream):
    one, two = stream(5, 2, 20)
    with replica.sdk() as sdk:
        first = sdk.predict("paused-once", one, idempotency_key="first")
        sdk.pause("paused-once", idempotency_key="pause")
        again = sdk.predict("paused-once", one, idempotency_key="first")
        assert (again.state.version, again.state.committed, again.state.replayed) == (1, True, "stored")
        assert again.indices.tolist() == first.indices.tolist()
        assert sdk.predict("paused-once", two, idempotency_key="second").state.committed is False
        sdk.resume("paused-once")
        told = sdk.pause("paused-once", idempotency_key="pause")
        assert (told.adaptation, told.state.replayed, told.state.version) == ("paused", "stored", 2)
        assert sdk.get("paused-once").adaptation == "running"
        with pytest.raises(KeyReusedError):
            sdk.resume("paused-once", idempotency_key="pause")
        applied = sdk.predict("paused-once", two, idempotency_key="second")
        assert (applied.state.version, applied.state.committed) == (4, True)


def test_labels_told_during_a_pause_are_counted_and_not_learned(make_replica, stream, serial):
    replica = make_replica(adapter="fedcal", adapter_options={"label_weight": 10.0}, guard="adapt")
    one, two = stream(0, 2, 20)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", one)
        sdk.pause("cam")
        rows = [LabelledRow(prediction.request_id, row, 7) for row in range(10)]
        assert sdk.feedback("cam", rows).rows.counted == 10
        assert sdk.feedback_images("cam", one, [7] * len(one)).rows.counted == len(one)
        assert sdk.get("cam").guard.evidence.labelled == 10 + len(one)
        same(sdk.predict("cam", two, probabilities=True), serial.probabilities("fedcal", [one, two])[1])
        sdk.resume("cam")
        same(sdk.predict("cam", two, probabilities=True), serial.probabilities("fedcal", [one, two])[1])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"adaptation": "off"}, '"running" or "paused"'),
        ({"adaptation": None}, '"running" or "paused"'),
        ({"adaptation": ["paused"]}, '"running" or "paused"'),
        ({"adaptation": "paused", "hyperparameters": {}}, "must be named"),
        ({"adaptation": "paused", "adapter": None}, "with an adapter or adaptation"),
    ],
)
def test_what_is_not_accepted_is_said(replica, assert_problem, body, says):
    assert says in assert_problem(replica.http.put("/clients/odd", json=body), 422, "invalid_configuration")["detail"]
    assert replica.http.get("/clients/odd").status_code == 404
