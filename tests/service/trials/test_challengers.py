"""Adapters that are tried out beside the clients' own, and the advice that comes of it."""

import re
import time
from contextlib import contextmanager

import pytest

from acclimate_client import LabelledRow
from acclimate_service.cli import main
from acclimate_service.settings import SettingsError
from acclimate_service.trials.challengers import scope_of


def settle(replica):
    """Wait until the candidates have done what they were given."""
    challengers = replica.service.challengers
    deadline = time.monotonic() + 20
    while challengers._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told(sdk, replica, client, images, labels):
    prediction = sdk.predict(client, images)
    settle(replica)
    rows = [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(labels)]
    result = sdk.feedback(client, rows)
    settle(replica)
    return prediction, result


@pytest.fixture
def trying(make_replica):
    return make_replica(
        adapter="fedcal", candidates=("none", "bn_adapt"), candidate_share=1.0, guard_clients=1, ask_budget=0
    )


def test_candidates_answer_nobody_and_are_compared_by_the_same_labels(trying, serial, stream):
    batches = stream(0, 3)
    labels = [[int(row.argmax()) for row in each] for each in serial.probabilities("bn_adapt", batches)]
    right = {"fedcal": 0, "none": 0, "bn_adapt": 0}
    with trying.sdk() as sdk:
        for images, truth in zip(batches, labels, strict=True):
            prediction, _ = told(sdk, trying, "cam", images, truth)
            assert prediction.adapter == "fedcal"
        found = {row.adapter: row for row in sdk.evidence("fashion-cnn").adapters}
        for method in right:
            for each, truth in zip(serial.probabilities(method, batches), labels, strict=True):
                right[method] += sum(int(row.argmax() == label) for row, label in zip(each, truth, strict=True))
        assert {name: row.candidate for name, row in found.items()} == {
            "fedcal": False,
            "none": True,
            "bn_adapt": True,
        }
        for name, row in found.items():
            assert row.evidence.labelled == 30
            assert row.evidence.adapted.accuracy == pytest.approx(right[name] / 30)
        assert sdk.get("cam").state.version == 6, "three batches and three times labels; the candidates count apart"


def test_a_delete_takes_the_candidates_states_too(trying, stream):
    with trying.sdk() as sdk:
        sdk.predict("cam", stream(0, 1)[0])
        settle(trying)
        model = trying.service.bundle.model.content_hash
        scopes = [scope_of(model, name) for name in trying.service.challengers.configurations]
        heads = [key for key in trying.keys("cam") if any(scope.encode() in key for scope in scopes)]
        assert len(heads) == 2
        sdk.delete("cam")
        assert {key.rpartition(b"}:")[2] for key in trying.keys("cam")} == {b"r", b"i", b"x"}


@contextmanager
def held_up(replica, client):
    """The candidates get no turn of this client before the end of the block."""
    with replica.at_work(client, *replica.service.challengers.sessions):
        yield
    settle(replica)


@pytest.mark.parametrize("anew", [False, True], ids=["gone", "there again"])
def test_a_candidate_that_comes_too_late_brings_back_nothing_of_a_deleted_client(trying, stream, anew):
    (images,) = stream(0, 1)
    with trying.sdk() as sdk:
        with held_up(trying, "cam"):
            prediction = sdk.predict("cam", images)
            sdk.feedback("cam", [LabelledRow(prediction.request_id, 0, 1)])
            sdk.delete("cam")
            if anew:
                sdk.configure("cam", "em")
        names = {key.rpartition(b"}:")[2] for key in trying.keys("cam")}
        scopes = {name.partition(b":")[0] for name in names if b":" in name}
        assert scopes == ({trying.service.bundle.model.content_hash.encode()} if anew else set())


def test_a_repeated_batch_and_repeated_labels_count_once_for_candidates_too(trying, serial, stream):
    (images,) = stream(0, 1)
    with trying.sdk() as sdk:
        for _ in range(3):
            prediction = sdk.predict("cam", images, idempotency_key="k")
            settle(trying)
        for _ in range(3):
            sdk.feedback("cam", [LabelledRow(prediction.request_id, 0, 1)], idempotency_key="f")
            sdk.feedback("cam", [LabelledRow(prediction.request_id, 0, 1)])
            settle(trying)
        assert {row.evidence.labelled for row in sdk.evidence("fashion-cnn").adapters} == {1}


def test_candidates_see_no_more_than_their_share(make_replica, stream):
    replica = make_replica(adapter="none", candidates=("fedcal",), candidate_share=0.2)
    (images,) = stream(0, 1)
    with replica.sdk() as sdk:
        for number in range(60):
            sdk.predict(f"cam-{number}", images)
            settle(replica)
    (name,) = replica.service.challengers.configurations
    scope = scope_of(replica.service.bundle.model.content_hash, name)
    assert 3 <= len(replica.redis.keys(f"*:{scope}:h")) <= 25


@pytest.mark.parametrize(("candidates", "said"), [(("nope",), "no adapter 'nope'"), (("fed_ade",), "anchors")])
def test_a_candidate_that_cannot_be_served_is_refused_at_the_start(make_replica, candidates, said):
    with pytest.raises(SettingsError, match=f"ACCLIMATE_CANDIDATES.*{said}"):
        make_replica(candidates=candidates)


def test_advice_names_what_the_labels_speak_for(trying, serial, stream, capsys):
    assert main(["advise", "--url", trying.url]) == 0
    assert "nobody has told a label yet" in capsys.readouterr().out
    with trying.sdk() as sdk:
        for client in range(8):
            for images in stream(client, 3):
                truth = [int(row.argmax()) for row in serial.probabilities("bn_adapt", [images])[0]]
                told(sdk, trying, f"cam-{client}", images, truth)
    assert main(["advise", "--url", trying.url + "/"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^bn_adapt \(candidate\) +8 +240 .*trusted$", said, re.MULTILINE)
    assert "use bn_adapt (candidate): better than no adaptation by 240 labelled rows" in said


def test_advice_says_why_there_is_none(make_replica, capsys):
    assert main(["advise", "--url", make_replica(guard="off").url]) == 2
    assert "ACCLIMATE_GUARD is off" in capsys.readouterr().err
    assert main(["advise", "--url", "http://127.0.0.1:9"]) == 2
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err
