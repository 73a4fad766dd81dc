"""Labels that teach: told once, learned once, whoever tells them and whichever replica is asked."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from acclimate_adapters import Labelled, State, create, guarded_step
from acclimate_client import LabelledRow
from acclimate_client.errors import InvalidStateError
from acclimate_service.compute.labelling import feedback_of, is_light
from acclimate_service.guard.record import Label

WEIGHT = {"label_weight": 10.0}
CLASS = 7


def rows_of(prediction, label, rows):
    return [LabelledRow(prediction.request_id, row, label) for row in rows]


def rows_told(prediction, labels):
    return [LabelledRow(prediction.request_id, row, int(label)) for row, label in enumerate(labels)]


def taught(serial, adapter, batches, told, **options):
    """Probabilities of the last batch, in process, after `told` labels of CLASS between the others and it."""
    method, model = create(adapter, **options), serial.bundle.model
    state = method.init(model)
    for images in batches[:-1]:
        state = guarded_step(method, model, state, serial.bundle.prepare(images)).state
    state = method.learn(model, state, Labelled(torch.full((told,), CLASS)))
    return guarded_step(method, model, state, serial.bundle.prepare(batches[-1])).logits.softmax(-1).numpy()


@pytest.mark.parametrize("adapter", ["fedcal", "balanced"])
@pytest.mark.parametrize("inline_max", [1, 2**17], ids=["by journal", "whole"])
def test_a_label_is_learned_once_by_the_next_answer_of_any_replica(make_replica, serial, stream, adapter, inline_max):
    settings = {"adapter": adapter, "adapter_options": WEIGHT, "guard": "adapt", "inline_max": inline_max}
    first = make_replica(**settings)
    second = make_replica(**settings, redis_url=first.service.settings.redis_url)
    one, two = stream(0, 2)
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        prediction = here.predict("cam", one)
        here.feedback("cam", rows_of(prediction, CLASS, range(4)), idempotency_key="k")
        here.feedback("cam", rows_of(prediction, CLASS, range(4)), idempotency_key="k")
        there.feedback("cam", rows_of(prediction, CLASS, range(4)), idempotency_key="k")
        there.feedback("cam", [*rows_of(prediction, CLASS, range(5)), *rows_of(prediction, 1, range(5))])
        there.feedback("cam", [LabelledRow("never-heard-of", 0, 1)])
        answer = there.predict("cam", two, probabilities=True)
    expected = taught(serial, adapter, [one, two], 5, **WEIGHT)
    np.testing.assert_allclose(answer.probabilities, expected, atol=1e-5)
    assert not np.allclose(expected, serial.probabilities(adapter, [one, two])[1], atol=1e-2)


PORTFOLIO = {
    "adapter": "portfolio",
    "guard": "adapt",
    "adapter_options": {"arms": ["fedcal(estimator=em)", "bn_adapt+em"]},
}
BN_ADAPT = 2.0
"""The arm of `bn_adapt+em`."""


@pytest.mark.parametrize("inline_max", [1, 2**20], ids=["by journal", "whole"])
def test_labels_choose_among_the_arms_of_a_client_whichever_replica_hears_them(
    make_replica, serial, stream, inline_max
):
    settings = {**PORTFOLIO, "inline_max": inline_max}
    first = make_replica(**settings)
    second = make_replica(**settings, redis_url=first.service.settings.redis_url)
    batches = stream(0, 3)
    frozen, adapted = (serial.probabilities(name, batches) for name in ("none", "bn_adapt+em"))
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        prediction = here.predict("cam", batches[0])
        late = there.predict("cam", batches[1], probabilities=True)
        np.testing.assert_allclose(late.probabilities, frozen[1], atol=1e-5)
        rows = rows_told(prediction, adapted[0].argmax(-1))
        for each in (here, there):
            each.feedback("cam", rows, idempotency_key="k")
        answer = there.predict("cam", batches[2], probabilities=True)
        assert answer.signals["arm"] == BN_ADAPT
        np.testing.assert_allclose(answer.probabilities, adapted[2], atol=1e-5)
        exported = there.export_state("cam")
        counts = State.from_bytes(exported).tensors["counts"]
        assert counts.sum() == counts[[kind for kind in range(8) if kind & 0b100]].sum() > 0, "it has all of them right"
        here.import_state("other", exported)
        assert here.predict("other", batches[2]).signals["arm"] == BN_ADAPT


def test_a_client_that_tells_nothing_follows_the_labels_of_the_others(make_replica, serial, stream):
    first = make_replica(**PORTFOLIO, inline_max=1)
    batches = stream(0, 2)
    right = serial.probabilities("bn_adapt+em", batches)[0].argmax(-1)
    with first.sdk() as here:
        prediction = here.predict("teller", batches[0])
        here.feedback("teller", rows_told(prediction, right))
        assert here.predict("silent", batches[1]).signals["arm"] == BN_ADAPT
    second = make_replica(**PORTFOLIO, inline_max=1, redis_url=first.service.settings.redis_url)
    with first.sdk() as here, second.sdk() as there:
        answer = there.predict("elsewhere", batches[1], probabilities=True, idempotency_key="k")
        assert answer.signals["arm"] == BN_ADAPT, "what was told before it started it knows from the first batch"
        here.delete("teller")
        first.run(first.service.arms.hear())
        assert here.predict("later", batches[1]).signals["arm"] == 0, "what it told went with it"
        again = there.predict("elsewhere", batches[1], probabilities=True, idempotency_key="k")
        np.testing.assert_array_equal(again.probabilities, answer.probabilities)


def test_labelled_images_choose_among_the_arms_too(make_replica, serial, stream, labelled):
    replica = make_replica(**PORTFOLIO)
    (warm,), (images, _) = stream(0, 1), labelled(0, 30)
    labels = serial.probabilities("bn_adapt+em", [images])[0].argmax(-1)
    with replica.sdk() as sdk:
        assert sdk.predict("cam", warm).signals["arm"] == 0
        replica.http.post("/clients/cam/feedback", **forms(images, labels)["raw"]).raise_for_status()
        assert sdk.predict("cam", warm).signals["arm"] == BN_ADAPT


def test_labels_teach_nothing_unless_the_operator_asks_for_it(make_replica, serial, stream):
    replica = make_replica(adapter="fedcal", guard="adapt")
    one, two = stream(0, 2)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", one)
        sdk.feedback("cam", rows_of(prediction, CLASS, range(10)))
        answer = sdk.predict("cam", two, probabilities=True)
    np.testing.assert_allclose(answer.probabilities, serial.probabilities("fedcal", [one, two])[1], atol=1e-5)


def test_few_labels_are_counted_at_once_and_many_beside_the_event_loop():
    adapter = create("atp")
    label = Label("0123456789abcdef0123456789abcdef", 7, 3)
    assert is_light(feedback_of([label] * 256), adapter)
    assert not is_light(feedback_of([label] * 10_000), adapter)
    assert not is_light(feedback_of([label]), create("fedcal", **WEIGHT))


def forms(images, labels):
    """The same labelled images in every form."""
    pixels, buffer = images[:, 0], io.BytesIO()
    np.save(buffer, pixels)
    json_labels = str(labels.tolist())
    return {
        "json": {"json": {"images": pixels.tolist(), "labels": labels.tolist()}},
        "npy": {
            "content": buffer.getvalue(),
            "headers": {"Content-Type": "application/x-npy", "X-Labels": json_labels},
        },
        "raw": {
            "content": images.tobytes(),
            "headers": {
                "Content-Type": "application/octet-stream",
                "X-Tensor-Shape": ",".join(map(str, images.shape)),
                "X-Labels": json_labels,
            },
        },
    }


@pytest.mark.parametrize("form", ["json", "npy", "raw"])
def test_labelled_images_count_as_what_both_models_make_of_them_now(make_replica, serial, stream, labelled, form):
    replica = make_replica(adapter="fedcal", guard="adapt")
    (warm,), (images, labels) = stream(0, 1), labelled(0, 30)
    with replica.sdk() as sdk:
        sdk.predict("cam", warm)
    told = replica.http.post("/clients/cam/feedback", **forms(images, labels)[form]).json()
    frozen = np.concatenate(serial.probabilities("none", [images])).argmax(-1)
    adapted = serial.probabilities("fedcal", [warm, images])[1].argmax(-1)
    guard = told["guard"]
    assert told["feedback"] == {"counted": 30, "duplicate": 0, "contradicting": 0, "unknown": 0}
    assert (guard["labelled"], guard["frozen"]["accuracy"]) == (30, pytest.approx((frozen == labels).mean()))
    assert guard["adapted"]["accuracy"] == pytest.approx((adapted == labels).mean())
    assert told["state"]["version"] == 2


def test_labelled_images_are_not_folded_in(make_replica, serial, stream, labelled):
    replica = make_replica(adapter="fedcal", guard="adapt")
    (one, two), (images, labels) = stream(0, 2), labelled(0, 5)
    with replica.sdk() as sdk:
        sdk.predict("cam", one)
        assert replica.http.post("/clients/cam/feedback", **forms(images, labels)["raw"]).status_code == 200
        answer = sdk.predict("cam", two, probabilities=True)
    np.testing.assert_allclose(answer.probabilities, serial.probabilities("fedcal", [one, two])[1], atol=1e-5)


def test_a_repeated_request_counts_and_teaches_labelled_images_once(make_replica, serial, stream, labelled):
    replica = make_replica(adapter="fedcal", adapter_options=WEIGHT, guard="adapt")
    (one, two), (images, _) = stream(0, 2), labelled(0, 6)
    form = forms(images, np.full(6, CLASS))["raw"]
    form["headers"]["Idempotency-Key"] = "k"
    with replica.sdk() as sdk:
        sdk.predict("cam", one)
        replies = [replica.http.post("/clients/cam/feedback", **form).json() for _ in range(3)]
        assert [reply["guard"]["labelled"] for reply in replies] == [6, 6, 6]
        assert [reply["state"]["replayed"] for reply in replies] == ["none", "stored", "stored"]
        answer = sdk.predict("cam", two, probabilities=True)
    np.testing.assert_allclose(answer.probabilities, taught(serial, "fedcal", [one, two], 6, **WEIGHT), atol=1e-5)
    form["headers"]["X-Labels"] = str([1] * 6)
    assert replica.http.post("/clients/cam/feedback", **form).json()["code"] == "key_reused"


def test_labelled_images_are_evidence_for_a_client_that_has_sent_no_batch_yet(make_replica, labelled):
    replica = make_replica(adapter="fedcal", guard="adapt")
    images, labels = labelled(0, 20)
    with replica.sdk() as sdk:
        sdk.configure("cam", "bn_adapt")
        for number in (20, 40):
            replica.http.post("/clients/cam/feedback", **forms(images, labels)["raw"]).raise_for_status()
            assert sdk.get("cam").guard.evidence.labelled == number
        assert sdk.evidence("fashion-cnn").adapters[0].evidence.labelled == 32, "as much as one client may weigh"


def test_labelled_images_enrol_a_client_of_fedthe_further(make_replica, serial, stream, labelled):
    replica = make_replica(adapter="fedthe", adapter_options={"examples": 64}, guard="adapt")
    (batch,), (images, labels) = stream(1, 1), labelled(0, 30)
    with replica.sdk() as sdk:
        sdk.enroll("cam", images[:10], labels[:10])
        replica.http.post("/clients/cam/feedback", **forms(images[10:], labels[10:])["raw"]).raise_for_status()
        answer = sdk.predict("cam", batch, probabilities=True)
    method, model = create("fedthe"), serial.bundle.model
    state = method.init(model, x=serial.bundle.prepare(images), labels=torch.from_numpy(labels))
    expected = guarded_step(method, model, state, serial.bundle.prepare(batch)).logits.softmax(-1)
    np.testing.assert_allclose(answer.probabilities, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"X-Labels": "[1]"}, 422, "invalid_labels"),
        ({"X-Labels": '["Spaceship", 1]'}, 422, "invalid_labels"),
        ({"X-Tensor-Shape": "2,1,28,27"}, 422, None),
    ],
)
def test_labelled_images_that_are_not_as_expected_change_nothing(replica, labelled, change, status, code):
    images, labels = labelled(0, 2)
    form = forms(images, labels)["raw"]
    with replica.sdk() as sdk:
        version = sdk.predict("strict-images", images).state.version
        refused = replica.http.post(
            "/clients/strict-images/feedback", **{**form, "headers": {**form["headers"], **change}}
        )
        assert refused.status_code == status
        assert code is None or refused.json()["code"] == code
        assert sdk.get("strict-images").state.version == version


def test_labelled_images_of_a_client_that_nobody_has_seen_do_not_begin_it(replica, labelled):
    reply = replica.http.post("/clients/nobody-yet/feedback", **forms(*labelled(0, 2))["raw"])
    assert (reply.status_code, reply.json()["code"]) == (404, "client_unknown")
    assert replica.keys("nobody-yet") == {}


def test_what_was_learned_moves_with_an_exported_state_and_is_checked(make_replica, serial, stream):
    replica = make_replica(adapter="fedcal", adapter_options=WEIGHT, guard="adapt")
    one, two = stream(0, 2)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", one)
        sdk.feedback("cam", rows_of(prediction, CLASS, range(5)))
        data = sdk.export_state("cam")
        sdk.import_state("other", data)
        answer = sdk.predict("other", two, probabilities=True)
        np.testing.assert_allclose(answer.probabilities, taught(serial, "fedcal", [one, two], 5, **WEIGHT), atol=1e-5)
        state = State.from_bytes(data)
        labels = torch.full_like(state.tensors["labels"], 99)
        with pytest.raises(InvalidStateError):
            sdk.import_state("third", replace(state, tensors={**state.tensors, "labels": labels}).to_bytes())
