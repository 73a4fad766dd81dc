"""What the methods beside predict send and make of a healthy reply, over real HTTP, for both clients."""

import io
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from PIL import Image

from acclimate_client import (
    AdapterDescription,
    ExportedState,
    FailedClient,
    KeptState,
    ListedClient,
    StateInfo,
    TimelinePoint,
    UnexpectedReplyError,
    Usage,
)

IMAGES = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def png():
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_client_is_paused_and_resumed_under_a_key_and_its_replies_say_so(client, server, play):
    for call, wanted in ((client.pause, "paused"), (client.resume, "running")):
        result = call("cam-7", idempotency_key="k")
        request = server.requests[-1]
        assert (request.method, request.path) == ("PUT", "/clients/cam-7")
        assert json.loads(request.body) == {"adaptation": wanted}
        assert request.headers["Idempotency-Key"] == "k"
        assert (result.adaptation, result.changed) == (wanted, True)
    assert client.get("cam-7").adaptation == "running"  # as of services that do not say


def test_a_rollback_names_a_version_or_none_and_says_which_was_restored(client, server, play):
    for version, body in ((None, b""), (412, b'{"version": 412}')):
        result = client.rollback("cam-7", version, idempotency_key="k")
        request = server.requests[-1]
        assert (request.method, request.path, request.body) == ("POST", "/clients/cam-7/rollback", body)
        assert request.headers["Idempotency-Key"] == "k"
        assert (result.restored, result.adapter, result.state.version) == (412, "atp", 5)
    sent = len(server.requests)
    for version in (0, True, "1"):
        with pytest.raises(ValueError, match="version"):
            client.rollback("cam-7", version)
    assert len(server.requests) == sent


def test_a_client_says_what_is_kept_of_it(client, server, play):
    assert client.get("cam-7").state.kept == ()  # as of services that do not say
    state = {"version": 5, "status": "warm", "bytes": 812, "tier": "redis"}
    kept = [{"version": 3, "at": "2031-05-06T07:08:09Z", "bytes": 812}]
    about = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "atp"}
    server.play(play.reply(body={**about, "state": {**state, "kept": kept}}))
    assert client.get("cam-7").state.kept == (KeptState(3, datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), 812),)


def test_a_timeline_is_asked_for_by_time_and_resolution(client, server):
    timeline = client.timeline("cam-7", since=datetime(2031, 5, 6, 7, tzinfo=UTC), resolution=60)
    request = server.requests[-1]
    assert (request.method, request.path) == ("GET", "/clients/cam-7/timeline")
    assert request.query == {"since": ["2031-05-06T07:00:00+00:00"], "resolution": ["60"]}
    assert (timeline.classes, timeline.training_prior) == (("Shirt", "Dress"), (0.5, 0.5))
    (point,) = timeline.points
    assert point == TimelinePoint(
        version=5,
        at=datetime(2031, 5, 6, 7, 8, 9, 125_000, UTC),
        batches=2,
        images=40,
        signals={"entropy": 0.5, "frozen": 0.0},
        events={"takeover": 1},
        prior=(0.25, 0.75),
        modules={"bn.weight": 0.01},
        verdict="harmful",
        taken_over_from="replica-2",
    )


def test_configure_sends_adapter_and_hyperparameters_and_says_whether_anything_changed(client, server):
    result = client.configure("cam-7", "atp", mode="batch", idempotency_key="k")
    request = server.requests[-1]
    assert (request.method, request.path) == ("PUT", "/clients/cam-7")
    assert json.loads(request.body) == {"adapter": "atp", "hyperparameters": {"mode": "batch"}}
    assert (request.headers["Content-Type"], request.headers["Idempotency-Key"]) == ("application/json", "k")
    assert (result.adapter, result.hyperparameters, result.changed) == ("atp", {"mode": "batch"}, True)
    assert (result.state.status, result.idempotency_key) == ("reset", "k")


def test_the_hyperparameters_of_a_chain_are_mappings_under_its_parts(client, server):
    client.configure("cam-7", "atp+fedcal", fedcal={"estimator": "em"})
    assert json.loads(server.requests[-1].body)["hyperparameters"] == {"fedcal": {"estimator": "em"}}


def test_a_hyperparameter_may_have_the_name_of_an_argument(client, server):
    client.configure("cam-7", "custom", adapter=1, client_id=2)
    assert json.loads(server.requests[-1].body)["hyperparameters"] == {"adapter": 1, "client_id": 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_hyperparameters_that_json_cannot_say_are_refused_before_anything_is_sent(client, server, value):
    with pytest.raises((TypeError, ValueError)):
        client.configure("cam-7", "atp", lr=value)
    assert server.requests == []


@pytest.mark.parametrize("labels", [[3, "Coat"], (np.int64(3), "Coat")])
def test_labels_go_with_arrays_in_a_header(client, server, labels):
    result = client.enroll("cam-7", IMAGES, labels, timeout=2.5)
    request = server.requests[-1]
    assert (request.method, request.path, request.body) == ("POST", "/clients/cam-7/enroll", IMAGES.tobytes())
    assert json.loads(request.headers["X-Labels"]) == [3, "Coat"]
    assert (request.headers["X-Tensor-Shape"], request.headers["X-Request-Timeout-Ms"]) == ("2,3,3", "2500")
    assert result.enrolled == 2
    assert result.state == StateInfo(5, "warm", committed=True, replayed="none", durability="always")


def test_an_array_of_labels_will_do(client, server):
    client.enroll("cam-7", IMAGES, np.array([3, 0]))
    assert json.loads(server.requests[-1].headers["X-Labels"]) == [3, 0]


def test_names_that_are_not_ascii_survive_in_the_header(client, server):
    client.enroll("cam-7", IMAGES, ["Müll", "T-shirt/top"])
    assert json.loads(server.requests[-1].headers["X-Labels"]) == ["Müll", "T-shirt/top"]


def test_labels_go_with_files_in_a_part_of_the_form(client, server):
    client.enroll("cam-7", [png(), png()], [3, "Coat"])
    request = server.requests[-1]
    boundary = request.headers["Content-Type"].partition("boundary=")[2]
    *files, labels, end = request.body.split(f"--{boundary}".encode())[1:]
    assert [png() in part for part in files] == [True, True]
    assert b'name="labels"' in labels
    assert labels.partition(b"\r\n\r\n")[2].strip() == b'[3, "Coat"]'
    assert end == b"--\r\n"
    assert "X-Labels" not in request.headers


@pytest.mark.parametrize(
    ("labels", "error"), [([3], ValueError), ("ab", TypeError), ([3, 1.5], TypeError), ([3, None], TypeError)]
)
def test_labels_that_cannot_be_right_are_refused_before_anything_is_sent(client, server, labels, error):
    with pytest.raises(error):
        client.enroll("cam-7", IMAGES, labels)
    assert server.requests == []


def test_the_answer_of_a_repeated_enrolment_may_be_gone(client, server, play):
    state = {"version": 5, "status": "warm", "committed": True, "replayed": "unavailable"}
    body = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "fedthe", "state": state}
    server.play(play.reply(body=body))
    assert client.enroll("cam-7", IMAGES, [0, 1]).enrolled is None


def test_an_exported_state_is_the_bytes_of_the_reply(client, server):
    assert client.export_state("cam-7") == b"state"
    assert (server.requests[-1].method, server.requests[-1].path) == ("GET", "/clients/cam-7/state")


def test_an_export_that_fails_raises(client, server, play):
    server.play(play.problem("client_unknown", 404, retryable=False))
    with pytest.raises(Exception, match="about client_unknown"):
        client.export_state("cam-7")


def test_an_imported_state_is_sent_as_it_is_and_may_name_the_version_it_replaces(client, server):
    client.import_state("cam-7", b"state", replaces=5, idempotency_key="k")
    request = server.requests[-1]
    assert (request.method, request.path, request.body) == ("PUT", "/clients/cam-7/state", b"state")
    assert (request.headers["If-Match"], request.headers["Idempotency-Key"]) == ('"v5"', "k")
    assert client.import_state("cam-7", b"state").state.version == 5
    assert "If-Match" not in server.requests[-1].headers


def test_clients_are_listed_by_what_is_asked_for(client, server, play):
    page = client.clients()
    listed = ListedClient(
        client_id="cam-7",
        adapter="atp",
        hyperparameters={"mode": "batch"},
        adaptation="paused",
        version=5,
        bytes=812,
        changed_at=datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC),
        verdict="harmful",
    )
    assert (page.clients, page.next, page.model.name) == ((listed,), None, "fashion-cnn")
    assert page.usage == Usage(clients=1, most_clients=100, bytes=812, most_bytes=None)
    assert (server.requests[-1].path, server.requests[-1].query) == ("/clients", {"limit": ["100"]})
    server.play(play.reply(body={"model": {"name": "m", "version": "1"}, "clients": [], "next": "c2"}))
    since = datetime(2031, 5, 6, tzinfo=UTC)
    page = client.clients("c1", limit=10, adapter="atp", active_since=since, verdict="harmful")
    assert (page.clients, page.next) == ((), "c2")
    assert server.requests[-1].query == {
        "cursor": ["c1"],
        "limit": ["10"],
        "adapter": ["atp"],
        "active_since": ["2031-05-06T00:00:00+00:00"],
        "verdict": ["harmful"],
    }
    sent = len(server.requests)
    with pytest.raises(ValueError, match="a time with its zone"):
        client.clients(active_since=datetime(2031, 5, 6))
    assert len(server.requests) == sent


FAILED = {"client_id": "cam-8", "code": "state_corrupt", "detail": "a chunk is gone", "state_committed": False}


def lines(*documents):
    return b"".join(json.dumps(each).encode() + b"\n" for each in documents)


def test_states_of_many_are_fetched_a_page_at_a_time(client, server, play):
    one = {"client_id": "cam-7", "adapter": "atp", "hyperparameters": {"mode": "batch"}, "version": 5, "later": 1}
    end = {"exported": 1, "failed": 1, "next": "c2", "later": 1}
    server.play(play.reply(body=lines(one | {"state": "c3RhdGU="}, FAILED, end)))
    page = client.export_states("c1", limit=10, verdict="harmful")
    assert page.states == (ExportedState("cam-7", "atp", {"mode": "batch"}, 5, b"state"),)
    assert page.failed == (FailedClient("cam-8", "state_corrupt", "a chunk is gone", state_committed=False),)
    assert page.next == "c2"
    assert (server.requests[-1].method, server.requests[-1].path) == ("GET", "/states")
    assert server.requests[-1].query == {"cursor": ["c1"], "limit": ["10"], "verdict": ["harmful"]}


@pytest.mark.parametrize("cut", [lines(FAILED, {"exported": 1, "failed": 1, "next": None}), lines(FAILED), b""])
def test_a_page_of_states_that_is_not_whole_is_no_page(client, server, play, cut):
    server.play(play.reply(body=cut))
    with pytest.raises(UnexpectedReplyError):
        client.export_states()


def test_many_are_deleted_only_when_it_is_said_which(client, server, play):
    with pytest.raises(ValueError, match="everyone=True means all"):
        client.delete_clients()
    assert server.requests == []
    body = {"model": {"name": "m", "version": "1"}, "deleted": ["cam-7"], "failed": [FAILED], "next": None, "later": 1}
    server.play(play.reply(body=body), play.reply(body=body))
    page = client.delete_clients(adapter="atp")
    assert (page.deleted, [each.client_id for each in page.failed], page.next) == (("cam-7",), ["cam-8"], None)
    assert server.requests[-1].query == {"limit": ["100"], "adapter": ["atp"]}
    client.delete_clients("c1", everyone=True)
    assert (server.requests[-1].method, server.requests[-1].path) == ("DELETE", "/clients")
    assert server.requests[-1].query == {"cursor": ["c1"], "limit": ["100"], "all": ["true"]}


def test_adapters_are_described(client):
    assert client.adapters() == (
        AdapterDescription(
            name="fedthe",
            description="Mix the heads.",
            enrols=True,
            available=False,
            missing=("descriptor",),
            hyperparameters={"type": "object", "properties": {"alpha": {"type": "number"}}},
        ),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.configure("cam-7", "atp"),
        lambda client: client.enroll("cam-7", IMAGES, [0, 1]),
        lambda client: client.import_state("cam-7", b"state"),
    ],
    ids=["configure", "enroll", "import"],
)
def test_every_change_is_repeated_under_one_key(client, server, play, call):
    server.play(play.problem("store_unavailable", 503, retryable=True), play.drop())
    result = call(client)
    assert len(server.requests) == 3
    assert {request.headers["Idempotency-Key"] for request in server.requests} == {result.idempotency_key}
    assert len({request.body for request in server.requests}) == 1
