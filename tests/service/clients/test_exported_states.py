"""States leave the service as bytes and come back."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from acclimate_adapters import ADAPTERS, State
from acclimate_client.errors import (
    ClientUnknownError,
    InvalidStateError,
    KeyReusedError,
    PreconditionFailedError,
    StateMismatchError,
)

NAMES = [*sorted(set(ADAPTERS) - {"gated", "failing", "memo", "fedthe_plus"}), "atp+fedcal", "bn_adapt+em"]


@pytest.fixture(scope="module")
def every(anchored_store, tmp_path_factory, run_service):
    with run_service(data_dir=tmp_path_factory.mktemp("every"), model_store=anchored_store, adapter="none") as replica:
        yield replica


@pytest.fixture(scope="module")
def sdk(every):
    with every.sdk() as client:
        yield client


def put(replica, client_id, data, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return replica.http.put(f"/clients/{client_id}/state", content=data, headers=named)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_imports_the_state_of_another_goes_on_like_it(sdk, stream, name):
    (*first, last), one, other = stream(1, 4, 8), f"from-{name}".replace("+", "."), f"to-{name}".replace("+", ".")
    sdk.configure(one, name)
    for images in first:
        sdk.predict(one, images)
    data = sdk.export_state(one)
    assert State.from_bytes(data).step == 3
    sdk.configure(other, name)
    result = sdk.import_state(other, data)
    begin = sdk.get(other).state.version
    assert (result.adapter, result.state.version, result.state.committed) == (name, begin, True)
    assert sdk.export_state(other) == data
    expected = sdk.predict(one, last, probabilities=True)
    prediction = sdk.predict(other, last, probabilities=True)
    assert prediction.state.version == begin + 1
    assert np.array_equal(prediction.probabilities, expected.probabilities)
    assert sdk.export_state(other) == sdk.export_state(one)


def test_the_state_of_an_enrolled_client_can_be_imported_too(sdk, labelled, stream):
    images, labels = labelled(3, 20)
    (batch,) = stream(3, 1)
    for client_id in ("giver", "taker"):
        sdk.configure(client_id, "fedthe")
    sdk.enroll("giver", images, labels)
    sdk.import_state("taker", sdk.export_state("giver"))
    taken = sdk.predict("taker", batch, probabilities=True)
    assert taken.signals["enrolled"] == 1
    assert np.array_equal(taken.probabilities, sdk.predict("giver", batch, probabilities=True).probabilities)


def test_an_export_is_a_safetensors_file_with_the_version_as_its_etag(every, sdk, stream):
    sdk.configure("tagged", "atp")
    sdk.predict("tagged", stream(0, 1)[0])
    reply = every.http.get("/clients/tagged/state")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
    assert reply.headers["etag"] == '"v2"'
    assert safetensors.torch.load(reply.content)
    assert sdk.export_state("tagged") == reply.content
    before = every.keys("tagged")
    sdk.export_state("tagged")
    assert every.keys("tagged") == before


def test_an_export_after_a_reset_is_the_initial_state(sdk, stream):
    sdk.configure("blank", "t3a")
    sdk.predict("blank", stream(0, 1)[0])
    sdk.reset("blank")
    assert State.from_bytes(sdk.export_state("blank")).step == 0


def test_a_client_nobody_has_seen_has_nothing_to_export_and_may_import(every, sdk, stream):
    with pytest.raises(ClientUnknownError):
        sdk.export_state("nobody")
    assert every.keys("nobody") == {}
    sdk.predict("somebody", stream(0, 1)[0])
    assert sdk.import_state("nobody", sdk.export_state("somebody")).state.version == 1


def test_a_repeated_import_is_not_applied_again(every, sdk, stream):
    one, two = stream(0, 2)
    sdk.configure("twice", "tent")
    sdk.predict("twice", one)
    data = sdk.export_state("twice")
    first = sdk.import_state("twice", data, idempotency_key="k")
    sdk.predict("twice", two)
    kept = every.keys("twice")
    again = sdk.import_state("twice", data, idempotency_key="k")
    assert (again.state.version, again.state.replayed) == (first.state.version, "stored")
    assert every.keys("twice") == kept
    with pytest.raises(KeyReusedError):
        sdk.import_state("twice", sdk.export_state("twice"), idempotency_key="k")


def test_an_import_may_name_the_version_it_replaces(every, sdk, stream):
    sdk.configure("guarded", "tent")
    sdk.predict("guarded", stream(0, 1)[0])
    data = sdk.export_state("guarded")
    with pytest.raises(PreconditionFailedError, match="v2"):
        sdk.import_state("guarded", data, replaces=1)
    done = sdk.import_state("guarded", data, replaces=2, idempotency_key="k")
    assert done.state.version == 3
    again = sdk.import_state("guarded", data, replaces=2, idempotency_key="k")
    assert (again.state.version, again.state.replayed) == (3, "stored")
    assert sdk.get("guarded").state.version == 3


@pytest.mark.parametrize(
    ("header", "status"), [('"v1"', 200), ('"v9", "v1"', 200), ("*", 200), ('"v9"', 412), ("v1", 422), ("", 422)]
)
def test_if_match_takes_etags_and_a_star(every, sdk, stream, header, status):
    sdk.delete("match")
    sdk.predict("match", stream(0, 1)[0])
    assert put(every, "match", sdk.export_state("match"), If_Match=header).status_code == status


@pytest.mark.parametrize("header", ['"v1"', "*"])
def test_if_match_is_never_met_by_a_client_nobody_has_seen(every, sdk, stream, assert_problem, header):
    sdk.predict("source", stream(0, 1)[0])
    assert_problem(put(every, "absent", sdk.export_state("source"), If_Match=header), 412, "precondition_failed")
    assert every.keys("absent") == {}


def test_a_state_of_another_adapter_or_model_is_409_and_changes_nothing(every, sdk, stream, assert_problem):
    sdk.configure("theirs", "atp")
    sdk.predict("theirs", stream(0, 1)[0])
    sdk.configure("ours", "tent")
    before = every.keys("ours")
    with pytest.raises(StateMismatchError, match="configure the client first"):
        sdk.import_state("ours", sdk.export_state("theirs"))
    for change in ({"model": "0" * 16}, {"layout": 99}, {"adapter": "atp+em"}):
        data = altered(sdk.export_state("ours"), **change)
        assert_problem(put(every, "ours", data), 409, "state_mismatch")
    assert every.keys("ours") == before


def altered(data, tensors=lambda tensors: tensors, **header):
    state = State.from_bytes(data)
    fields = {"adapter": state.adapter, "layout": state.layout, "model": state.model, "step": state.step, **header}
    return State(**fields, tensors=tensors(dict(state.tensors))).to_bytes()


def first(tensors):
    return next(name for name, tensor in tensors.items() if tensor.is_floating_point())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not a state",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000,
        lambda data: safetensors.torch.save({}, {"acclimate": '{"adapter": "tent", "layout": Infinity}'}),
        lambda data: safetensors.torch.save({"a": torch.zeros(1)}),
        lambda data: safetensors.torch.save({"a": torch.zeros(1)}, {"acclimate": json.dumps({"adapter": "tent"})}),
        lambda data: altered(data, lambda t: {**t, "more": torch.zeros(3)}),
        lambda data: altered(data, lambda t: {n: v for n, v in t.items() if n != first(t)}),
        lambda data: altered(data, lambda t: {**t, first(t): t[first(t)][..., :-1].contiguous()}),
        lambda data: altered(data, lambda t: {**t, first(t): t[first(t)].double()}),
        lambda data: altered(data, lambda t: {**t, first(t): torch.full_like(t[first(t)], torch.nan)}),
        lambda data: altered(data, lambda t: {**t, first(t): torch.full_like(t[first(t)], -torch.inf)}),
        lambda data: altered(data, step=-1),
        lambda data: altered(data, step=2**60),
    ],
    ids=[
        "empty",
        "text",
        "cut",
        "longer",
        "length",
        "deep",
        "endless layout",
        "no header",
        "half a header",
        "tensor more",
        "tensor less",
        "shape",
        "precision",
        "nan",
        "infinite",
        "step below 0",
        "step too large",
    ],
)
def test_a_damaged_state_is_422_and_changes_nothing(every, sdk, stream, assert_problem, damage):
    sdk.configure("sound", "tent")
    if sdk.get("sound").state.version == 1:
        sdk.predict("sound", stream(0, 1)[0])
    before, data = every.keys("sound"), sdk.export_state("sound")
    with pytest.raises(InvalidStateError):
        sdk.import_state("sound", damage(data))
    assert_problem(put(every, "sound", damage(data)), 422, "invalid_state")
    assert every.keys("sound") == before


@pytest.mark.parametrize(
    ("adapter", "tensor", "changed"),
    [
        ("balanced", "rows", lambda tensor: tensor - 1e6),  # was a 500 at every batch
        ("fedcal", "rows", lambda tensor: tensor - 1_000_000),
        ("atp", None, lambda tensor: tensor.reshape(-1)[:1]),  # was broadcast
        ("shot", None, None),  # was taken without its tensors
    ],
)
def test_a_state_that_the_adapter_never_makes_is_422(every, sdk, stream, assert_problem, adapter, tensor, changed):
    client = f"never-{adapter}"
    sdk.configure(client, adapter)
    sdk.predict(client, stream(0, 1)[0])

    def spoil(tensors):
        name = tensor or sorted(tensors)[0]
        return {**tensors, name: changed(tensors[name])} if changed else {}

    assert_problem(put(every, client, altered(sdk.export_state(client), spoil)), 422, "invalid_state")


def test_counts_from_which_no_step_succeeds_are_422(every, sdk, stream, assert_problem):
    sdk.configure("counts", "t3a")
    sdk.predict("counts", stream(0, 1)[0])
    data = altered(sdk.export_state("counts"), lambda t: {**t, "supports": torch.full_like(t["supports"], 3e38)})
    assert_problem(put(every, "counts", data), 422, "invalid_state")


def test_a_state_over_the_limit_or_of_another_type_is_refused(make_replica, assert_problem):
    replica = make_replica(max_state_bytes=1000)
    assert_problem(put(replica, "cam", bytes(1001)), 413, "body_too_large")
    assert_problem(put(replica, "cam", b"{}", Content_Type="application/json"), 415, "unsupported_media_type")


@pytest.mark.parametrize("what", ["configure", "import"])
def test_concurrent_copies_of_a_change_are_applied_once(every, sdk, stream, pool, what):
    client_id = f"copies-{what}"
    sdk.predict(client_id, stream(0, 1)[0])
    data = sdk.export_state(client_id)

    def send(_):
        with every.sdk(max_retries=20) as own:
            if what == "configure":
                return own.configure(client_id, "atp", idempotency_key="k")
            return own.import_state(client_id, data, idempotency_key="k")

    assert {result.state.version for result in pool.map(send, range(6))} == {2}
    assert sdk.get(client_id).state.version == 2


@pytest.mark.parametrize("what", ["configure", "enroll", "import"])
def test_a_retry_on_another_replica_gets_the_first_answer(make_replica, labelled, stream, what):
    first = make_replica(adapter="fedthe")
    second = make_replica(adapter="fedthe", redis_url=first.service.settings.redis_url)
    images, labels = labelled(0, 6)
    with first.sdk() as one, second.sdk() as two:
        one.predict("cam", images)
        data = one.export_state("cam")
        calls = {
            "configure": lambda sdk: sdk.configure("cam", "tent", idempotency_key="k"),
            "enroll": lambda sdk: sdk.enroll("cam", images, labels, idempotency_key="k"),
            "import": lambda sdk: sdk.import_state("cam", data, idempotency_key="k"),
        }
        done = calls[what](one)
        one.predict("cam", stream(0, 1)[0])
        again = calls[what](two)
        assert (again.state.version, again.state.replayed) == (done.state.version, "stored")
        assert two.get("cam").state.version == 3
