"""Labels told after the answer, and what they make of the answers that follow."""

import time

import numpy as np
import pytest

from acclimate_client import LabelledRow
from acclimate_client.errors import ClientUnknownError, GuardOffError, InvalidFeedbackError
from acclimate_service.cli import main
from acclimate_service.guard.fleet import REFRESH_S


@pytest.fixture
def harmed(make_replica, contrary):
    """A service whose adapter is always wrong where the frozen model is right."""
    return make_replica(adapter="contrary")


def frozen_classes(serial, images):
    return [int(row.argmax()) for row in serial.probabilities("none", [images])[0]]


def rows_of(prediction, labels):
    return [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(labels)]


def tell_the_truth(sdk, serial, client, batches):
    """Send batches, and tell after each that the frozen model was right."""
    told = None
    for images in batches:
        prediction = sdk.predict(client, images)
        told = sdk.feedback(client, rows_of(prediction, frozen_classes(serial, images)))
    return told


def test_labels_are_counted_by_what_both_predictions_said(harmed, serial, stream):
    (images,) = stream(0, 1)
    truth = frozen_classes(serial, images)
    with harmed.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        assert prediction.guard is None
        told = sdk.feedback("cam", rows_of(prediction, truth[:3]))
        assert (told.rows.counted, told.rows.duplicate, told.rows.unknown) == (3, 0, 0)
        evidence = told.guard.evidence
        assert (evidence.labelled, evidence.wins, evidence.losses, evidence.verdict) == (3, 0, 3, "undecided")
        assert evidence.frozen.accuracy == 1.0
        assert evidence.adapted.accuracy == 0.0
        assert 0 <= evidence.frozen.low < 1 == evidence.frozen.high
        assert sdk.get("cam").guard == told.guard
        assert sdk.get("cam").state.version == told.state.version == 2


def test_each_row_counts_once_whoever_tells_it_however_often(harmed, serial, stream):
    (images,) = stream(0, 1)
    classes = harmed.service.bundle.manifest.classes
    truth = frozen_classes(serial, images)
    with harmed.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        first = sdk.feedback("cam", rows_of(prediction, truth[:4]), idempotency_key="k")
        again = sdk.feedback("cam", rows_of(prediction, truth[:4]), idempotency_key="k")
        assert again.rows == first.rows
        assert again.state.replayed in ("stored", "recomputed")
        named = [LabelledRow(prediction.request_id, row, classes[truth[row]]) for row in range(5)]
        other = [LabelledRow(prediction.request_id, 0, (truth[0] + 1) % 10), LabelledRow("never-heard-of", 0, 1)]
        told = sdk.feedback("cam", [*named, *other])
        assert (told.rows.counted, told.rows.duplicate) == (1, 4)
        assert (told.rows.contradicting, told.rows.unknown) == (1, 1)
        assert told.guard.evidence.labelled == 5
    assert harmed.metric('acclimate_labels_total{result="counted"}') == 5


def test_rows_are_asked_for_where_both_differ_until_there_is_a_verdict(make_replica, contrary, serial, stream):
    replica = make_replica(adapter="contrary", ask_budget=0.2)
    batches = stream(0, 12)
    with replica.sdk() as sdk:
        assert sdk.predict("cam", batches[0], adapt=False).ask == (), "nobody would remember what it is about"
        asked = []
        for number, images in enumerate(batches):
            prediction = sdk.predict("cam", images, idempotency_key=f"k{number}")
            assert sdk.predict("cam", images, idempotency_key=f"k{number}").ask == prediction.ask
            asked.append(prediction.ask)
            truth = frozen_classes(serial, images)
            rows = [LabelledRow(prediction.request_id, row, truth[row]) for row in prediction.ask]
            told = sdk.feedback("cam", rows).rows if rows else None
            assert told is None or told.counted == len(rows)
        assert sdk.get("cam").guard.evidence.verdict == "harmful"
        assert 7 <= sum(map(len, asked)) < 30
        assert asked[-1] == ()


def test_a_client_that_adaptation_harms_is_caught_and_answered_by_the_global_model(harmed, serial, stream):
    batches = stream(1, 5)
    with harmed.sdk() as sdk:
        told = tell_the_truth(sdk, serial, "cam", batches[:3])
        assert told.guard.evidence.verdict == "harmful"
        assert (told.guard.decision.answering, told.guard.decision.because) == ("frozen", "own_harmful")
        guarded = sdk.predict("cam", batches[3], probabilities=True)
        assert guarded.state.status == "guarded"
        assert (guarded.guard.answering, guarded.guard.because) == ("frozen", "own_harmful")
        assert np.allclose(guarded.probabilities, *serial.probabilities("none", batches[3:4]), rtol=0, atol=1e-5)
        assert guarded.adapter == "contrary", "it goes on in the shadow"
        look = sdk.predict("cam", batches[4], adapt=False)
        assert (look.state.status, look.guard.answering) == ("guarded", "frozen")
    assert harmed.metric('acclimate_guard_switches_total{because="own_harmful",to="frozen"}') == 1
    assert harmed.metric('acclimate_guarded_answers_total{because="own_harmful"}') == 3, "ten labels were enough"


def test_evidence_turns_when_adaptation_begins_to_help(harmed, serial, stream):
    with harmed.sdk() as sdk:
        tell_the_truth(sdk, serial, "cam", stream(1, 2))
        assert sdk.predict("cam", stream(2, 1)[0]).state.status == "guarded"
        said = []
        for images in stream(3, 8):
            prediction = sdk.predict("cam", images)
            said += [prediction.guard]
            truth = [(label + 1) % 10 for label in frozen_classes(serial, images)]
            told = sdk.feedback("cam", rows_of(prediction, truth))
        assert told.guard.evidence.verdict == "trusted"
        back = sdk.predict("cam", stream(2, 1)[0])
        assert (back.state.status, back.guard) == ("warm", None)
        answering = [decision.answering for decision in said if decision]
        assert answering == ["frozen"] * (len(answering) - 1) + ["adapted"], "the way back is said once"


def test_clients_without_labels_follow_the_fleet(harmed, make_replica, serial, stream):
    other = make_replica(redis_url=harmed.service.settings.redis_url, adapter="contrary")
    (images,) = stream(5, 1)
    with harmed.sdk() as here, other.sdk() as there:
        assert there.predict("untold", images).state.status == "cold"
        for number in range(5):
            assert here.predict("new", images).state.status != "guarded"
            tell_the_truth(here, serial, f"cam-{number}", stream(1, 3))
        assert here.predict("new", images).state.status == "guarded"
        deadline = time.monotonic() + 5 * REFRESH_S
        while (answer := there.predict("untold", images)).state.status != "guarded":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.guard.because in ("fleet_harmful", "fleet_behind")
        shown = here.evidence("fashion-cnn")
        assert shown.policy == "follow-fleet"
        (row,) = shown.adapters
        assert (row.adapter, row.clients, row.evidence.labelled) == ("contrary", 5, 150)


def test_what_one_client_tells_decides_for_no_other_one_and_goes_with_it(harmed, serial, stream):
    images = stream(2, 1)[0]
    with harmed.sdk() as sdk:
        tell_the_truth(sdk, serial, "liar", stream(1, 6))
        assert sdk.get("liar").guard.evidence.labelled == 60
        (row,) = sdk.evidence("fashion-cnn").adapters
        assert (row.clients, row.evidence.labelled, row.evidence.verdict) == (1, 32, "undecided")
        assert sdk.predict("honest", images).guard is None
        sdk.delete("liar")
        assert not sdk.evidence("fashion-cnn").adapters


def test_operators_let_the_evidence_of_the_fleet_start_again(harmed, serial, stream, monkeypatch, capsys):
    settings = harmed.service.settings
    for name, value in (("REDIS_URL", settings.redis_url), ("MODEL_STORE", settings.model_store), ("THREADS", 1)):
        monkeypatch.setenv(f"ACCLIMATE_{name}", str(value))
    with harmed.sdk() as sdk:
        for number in range(5):
            tell_the_truth(sdk, serial, f"cam-{number}", stream(1, 1))
        assert sdk.predict("new", stream(2, 1)[0]).state.status == "guarded"
        assert main(["guard", "reset"]) == 0
        assert "the fleet's evidence about fashion-cnn/1 starts again" in capsys.readouterr().out
        assert not sdk.evidence("fashion-cnn").adapters
        assert sdk.predict("newer", stream(2, 1)[0]).guard is None
        assert sdk.get("cam-0").guard.evidence.labelled == 10
    assert "WARNING" not in capsys.readouterr().err


def test_configuring_clients_without_labels_leaves_no_trace_in_the_fleet(harmed, stream):
    with harmed.sdk() as sdk:
        sdk.predict("cam", stream(0, 1)[0])
        for number in range(9):
            sdk.configure("cam", "fedcal", window=100 + number)
        sdk.reset("cam")
        assert not sdk.evidence("fashion-cnn").adapters
    assert harmed.redis.keys("acc:{default/~*}:e") == []


def test_a_frozen_policy_holds_from_the_first_batch_of_every_replica_and_after_a_restart(
    make_replica, contrary, serial, stream
):
    (one,) = stream(2, 1)
    settings = {"adapter": "contrary", "guard": "frozen"}
    first = make_replica(**settings, replica="one")
    for replica in (first, make_replica(**settings, replica="two", redis_url=first.service.settings.redis_url)):
        with replica.sdk() as sdk:
            for client in ("cam", f"new-{replica.service.settings.replica}"):
                answer = sdk.predict(client, one, probabilities=True)
                assert (answer.state.status, answer.guard.because) == ("guarded", "policy")
                assert np.allclose(answer.probabilities, *serial.probabilities("none", [one]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("policy", "status"), [("adapt", "cold"), ("frozen", "guarded")])
def test_other_policies_ask_the_client_alone(make_replica, contrary, serial, stream, policy, status):
    replica = make_replica(adapter="contrary", guard=policy)
    with replica.sdk() as sdk:
        tell_the_truth(sdk, serial, "cam", stream(1, 3))
        assert sdk.predict("new", stream(2, 1)[0]).state.status == status
        assert sdk.predict("cam", stream(2, 1)[0]).state.status == "guarded"


@pytest.mark.parametrize("inline_max", [1, 2**17], ids=["by journal", "whole"])
def test_labels_survive_the_replica_that_counted_them(make_replica, contrary, serial, stream, inline_max):
    first = make_replica(adapter="contrary", inline_max=inline_max)
    second = make_replica(redis_url=first.service.settings.redis_url, adapter="contrary", inline_max=inline_max)
    (one, two) = stream(1, 2)
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        prediction = here.predict("cam", one)
        rows = rows_of(prediction, frozen_classes(serial, one))
        here.feedback("cam", rows[:6], idempotency_key="k")
        assert there.feedback("cam", rows[:6], idempotency_key="k").guard.evidence.labelled == 6
        told = there.feedback("cam", rows)
        assert (told.rows.counted, told.rows.duplicate, told.guard.evidence.labelled) == (4, 6, 10)
        assert there.predict("cam", two).state.status == "guarded"
        assert here.evidence("fashion-cnn").adapters[0].evidence.labelled == 10


def test_a_reset_begins_the_evidence_of_the_client_anew_and_the_fleet_keeps_what_it_knows(harmed, serial, stream):
    with harmed.sdk() as sdk:
        tell_the_truth(sdk, serial, "cam", stream(1, 2))
        sdk.reset("cam")
        assert sdk.get("cam").guard.evidence.labelled == 0
        (images,) = stream(2, 1)
        prediction = sdk.predict("cam", images)
        told = sdk.feedback("cam", rows_of(prediction, frozen_classes(serial, images)[:1]))
        assert told.guard.evidence.labelled == 1
        assert sdk.evidence("fashion-cnn").adapters[0].evidence.labelled == 21


def test_a_repeated_batch_is_labelled_by_the_request_id_of_its_first_answer(harmed, serial, stream):
    (images,) = stream(0, 1)
    with harmed.sdk() as sdk:
        first = sdk.predict("cam", images, idempotency_key="k")
        again = sdk.predict("cam", images, idempotency_key="k")
        assert again.request_id == first.request_id
        assert sdk.feedback("cam", rows_of(again, frozen_classes(serial, images))).rows.counted == 10


def test_a_batch_without_adaptation_is_not_remembered(harmed, stream):
    (images,) = stream(0, 1)
    with harmed.sdk() as sdk:
        sdk.predict("cam", images)
        look = sdk.predict("cam", images, adapt=False)
        assert sdk.feedback("cam", rows_of(look, [1])).rows.unknown == 1


def test_an_adapter_without_frozen_predictions_of_its_own_is_compared_all_the_same(make_replica, serial, stream):
    replica, (images,) = make_replica(adapter="bn_adapt", ask_budget=0), stream(0, 1)
    truth = frozen_classes(serial, images)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        told = sdk.feedback("cam", rows_of(prediction, truth))
        assert told.guard.evidence.frozen.accuracy == 1.0
        right = [int(label == index) for label, index in zip(truth, prediction.indices, strict=True)]
        assert told.guard.evidence.adapted.accuracy == pytest.approx(sum(right) / len(right))


def test_without_a_guard_nothing_is_remembered_and_labels_are_refused(make_replica, stream, assert_problem, post):
    replica, (images,) = make_replica(guard="off", adapter="fedcal"), stream(0, 1)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        with pytest.raises(GuardOffError):
            sdk.feedback("cam", rows_of(prediction, [1]))
        with pytest.raises(GuardOffError):
            sdk.evidence("fashion-cnn")
        assert sdk.get("cam").guard is None
        bare = sdk.get("cam").state.base_bytes
    with make_replica(adapter="fedcal").sdk() as sdk:
        sdk.predict("cam", images)
        assert 0 < sdk.get("cam").state.base_bytes - bare < 250


@pytest.mark.parametrize(
    "row",
    [
        {"request_id": "a", "row": 0},
        {"request_id": 7, "row": 0, "label": 1},
        {"request_id": "a", "row": -1, "label": 1},
        {"request_id": "a", "row": True, "label": 1},
        {"request_id": "a", "row": 0, "label": 10},
        {"request_id": "a", "row": 0, "label": "Spaceship"},
        {"request_id": "a", "row": 0, "label": None},
        {"request_id": "a" * 129, "row": 0, "label": 1},
        "row",
    ],
)
def test_rows_that_are_not_as_expected_are_refused_and_nothing_is_counted(replica, assert_problem, stream, row):
    with replica.sdk() as sdk:
        prediction = sdk.predict("strict", stream(0, 1)[0])
        before = sdk.get("strict")
    sound = {"request_id": prediction.request_id, "row": 0, "label": 1}
    reply = replica.http.post("/clients/strict/feedback", json={"rows": [sound, row]})
    assert "row 1" in assert_problem(reply, 422, "invalid_feedback")["detail"]
    with replica.sdk() as sdk:
        after = sdk.get("strict")
    assert (after.state.version, after.guard) == (before.state.version, before.guard)


@pytest.mark.parametrize("body", [{}, {"rows": []}, {"rows": 7}, [], {"rows": [{}] * 10_001}])
def test_a_body_without_rows_is_refused(replica, assert_problem, body):
    assert_problem(replica.http.post("/clients/strict/feedback", json=body), 422, "invalid_feedback")


def test_labels_for_a_client_that_nobody_has_seen_do_not_begin_it(replica):
    with replica.sdk() as sdk, pytest.raises(ClientUnknownError):
        sdk.feedback("nobody", [LabelledRow("a", 0, 1)])
    assert replica.keys("nobody") == {}
    with replica.sdk() as sdk, pytest.raises(InvalidFeedbackError):
        sdk.feedback("nobody", [LabelledRow("a", 0, "Spaceship")])


def test_another_model_has_no_evidence_here(replica, assert_problem):
    assert_problem(replica.http.get("/models/other/adapters"), 404, "not_found")
