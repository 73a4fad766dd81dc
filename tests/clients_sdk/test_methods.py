"""What each method sends and what it makes of a healthy reply, over real HTTP, for both clients."""

import inspect
import math
import pickle
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import get_args, get_origin

import numpy as np
import pytest

import acclimate_client
from acclimate_client import AsyncClient, Client, LabelledRow, ModelRef, StateInfo, StoredState, Timeout
from acclimate_client.errors import ProblemError, UnexpectedReplyError

IMAGES = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def test_a_prediction_holds_what_the_server_said(client):
    prediction = client.predict("cam-7", IMAGES, probabilities=True)
    assert (prediction.client_id, prediction.adapter, prediction.request_id) == ("cam-7", "atp", "r-1")
    assert prediction.model == ModelRef("fashion-cnn", "1")
    assert prediction.labels == ("Dress", "Dress")
    assert prediction.indices.dtype == np.int64
    assert prediction.indices.tolist() == [3, 3]
    assert prediction.confidence.tolist() == [0.75, 0.75]
    assert prediction.probabilities.shape == (2, 4)
    assert prediction.state == StateInfo(5, "warm", committed=True, replayed="none", durability="always")


def test_posteriors_are_none_unless_asked_for(client, server):
    assert client.predict("cam-7", IMAGES).probabilities is None
    assert server.requests[-1].query == {"adapt": ["true"], "probabilities": ["false"]}


def test_signals_are_numbers_and_tuples_and_unknown_kinds_are_left_out(client):
    signals = client.predict("cam-7", IMAGES).signals
    assert signals["entropy"] == 0.31
    assert signals["prior"] == (0.25, 0.75)
    assert math.isnan(signals["undefined"])
    assert "later" not in signals


def test_a_prediction_cannot_be_changed(client):
    prediction = client.predict("cam-7", IMAGES)
    with pytest.raises(AttributeError):
        prediction.adapter = "none"
    with pytest.raises(ValueError, match="read-only"):
        prediction.indices[0] = 0


def test_a_prediction_survives_pickling(client):
    prediction = client.predict("cam-7", IMAGES)
    assert pickle.loads(pickle.dumps(prediction)).labels == prediction.labels  # noqa: S301 - our own bytes


def test_the_request_carries_tensor_flags_deadline_and_a_new_key(client, server):
    prediction = client.predict("cam-7", IMAGES, adapt=False, timeout=2.5)
    request = server.requests[-1]
    assert (request.method, request.path, request.body) == ("POST", "/clients/cam-7/predict", IMAGES.tobytes())
    assert request.query == {"adapt": ["false"], "probabilities": ["false"]}
    assert request.headers["X-Tensor-Shape"] == "2,3,3"
    assert request.headers["X-Request-Timeout-Ms"] == "2500"
    assert request.headers["Idempotency-Key"] == prediction.idempotency_key
    assert uuid.UUID(prediction.idempotency_key).version == 4


def test_each_call_has_its_own_key_unless_one_is_given(client):
    first, second = client.predict("cam-7", IMAGES), client.predict("cam-7", IMAGES)
    assert first.idempotency_key != second.idempotency_key
    assert client.predict("cam-7", IMAGES, idempotency_key="batch 12").idempotency_key == "batch 12"


def test_the_deadline_stays_within_what_the_server_takes(client, server):
    client.predict("cam-7", IMAGES, timeout=3600)
    assert server.requests[-1].headers["X-Request-Timeout-Ms"] == "600000"


def test_a_replay_whose_answer_is_gone_is_an_empty_prediction(client, server, play):
    state = {"version": 9, "status": "warm", "committed": True, "replayed": "unavailable"}
    body = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "atp", "predictions": []}
    server.play(play.reply(body=body | {"state": state}))
    prediction = client.predict("cam-7", IMAGES)
    assert prediction.state.replayed == "unavailable"
    assert prediction.labels == ()
    assert prediction.indices.shape == prediction.confidence.shape == (0,)
    assert prediction.indices.dtype == np.int64


def test_get_describes_the_stored_state(client):
    assert client.get("cam-7").state == StoredState(
        version=5,
        status="warm",
        bytes=812,
        tier="redis",
        durability="always",
        base=3,
        journal_entries=2,
        journal_bytes=1568,
        owner="replica-1",
        expires_in_s=2591999.5,
    )


def test_reset_sends_a_key_and_says_what_became_of_the_state(client, server):
    result = client.reset("cam-7", idempotency_key="r1")
    assert (result.state.status, result.idempotency_key) == ("reset", "r1")
    assert server.requests[-1].path == "/clients/cam-7/reset"
    assert server.requests[-1].headers["Idempotency-Key"] == "r1"


def test_delete_returns_nothing(client, server):
    assert client.delete("cam-7") is None
    assert (server.requests[-1].method, server.requests[-1].path) == ("DELETE", "/clients/cam-7")


def test_models_lists_classes_input_and_adapters(client):
    (model,) = client.models()
    assert (model.classes, model.input.height, model.default) == (("Shirt", "Dress"), 28, True)
    assert model.adapters["atp"].missing == ("rates",)
    assert model.adapters["none"].available


def test_probes_are_true_when_the_server_is_well(client):
    assert client.live() is True
    assert client.ready() is True


def test_probes_are_false_at_once_when_nobody_listens(connect, free_url, slept):
    client = connect(free_url)
    assert client.live() is False
    assert client.ready() is False
    assert slept == []


def test_ready_is_false_while_the_server_warms_up_or_a_proxy_finds_none(client, server, play, slept):
    server.play(play.reply(503, {"ready": False, "live": True, "reason": "warming up"}), play.reply(502, b"<html>"))
    assert client.ready() is False
    assert client.ready() is False
    assert slept == []


def test_a_probe_of_another_kind_of_server_is_an_error_and_not_false(client, server, play):
    server.play(play.reply(404, b"no such page"), play.reply(200, b"<html>"))
    with pytest.raises(ProblemError, match=r"http_404 \(404\): no such page"):
        client.live()
    with pytest.raises(UnexpectedReplyError):
        client.ready()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.predict("cam-7", IMAGES),
        lambda client: client.rollback("cam-7"),
        lambda client: client.feedback("cam-7", [LabelledRow("r-1", 0, 1)]),
        lambda client: client.get("cam-7"),
        lambda client: client.clients(),
        lambda client: client.timeline("cam-7"),
        lambda client: client.models(),
    ],
    ids=["predict", "rollback", "feedback", "get", "clients", "timeline", "models"],
)
@pytest.mark.parametrize("document", [[], 7, "text"])
def test_json_that_is_no_object_is_an_unexpected_reply(client, server, play, call, document):
    server.play(play.reply(body=document))
    with pytest.raises(UnexpectedReplyError, match="does not answer like an Acclimate server"):
        call(client)


def test_a_member_that_is_missing_or_of_another_type_is_named(client, server, play):
    server.play(play.reply(body={"model": {"name": "m"}, "deleted": [], "failed": [], "next": None}))
    server.play(play.reply(body={"deleted": [], "failed": []}), play.reply(body={"deleted": ["a", 7], "failed": []}))
    assert client.delete_clients(everyone=True).deleted == ()  # what the result has no place for is not looked at
    with pytest.raises(UnexpectedReplyError, match="no member 'next'"):
        client.delete_clients(everyone=True)
    with pytest.raises(UnexpectedReplyError, match="expected str, found 7"):
        client.delete_clients(everyone=True)


def test_a_path_prefix_of_the_base_url_is_kept(connect, server, play):
    server.play(play.reply(204))
    connect(f"{server.url}/acclimate/").delete("cam-7")
    assert server.requests[-1].path == "/acclimate/clients/cam-7"


def test_headers_of_the_caller_go_with_every_request(connect, server):
    connect(server.url, headers={"Authorization": "Bearer secret"}).models()
    assert server.requests[-1].headers["Authorization"] == "Bearer secret"
    assert server.requests[-1].headers["User-Agent"] == f"acclimate-client/{acclimate_client.__version__}"


@pytest.mark.parametrize("client_id", ["", "a/b", "../x", "ä", "-a", "a" * 129, "a\n", "a b"])
def test_a_bad_client_id_is_refused_before_anything_is_sent(client, server, client_id):
    with pytest.raises(ValueError, match=r"client_id is .* accepted are"):
        client.predict(client_id, IMAGES)
    with pytest.raises(ValueError, match="client_id is"):
        client.delete(client_id)
    assert server.requests == []


@pytest.mark.parametrize("key", ["", " a", "a ", "ä", "a\nb", "a" * 256])
def test_a_bad_key_is_refused_before_anything_is_sent(client, server, key):
    with pytest.raises(ValueError, match=r"idempotency_key is .* accepted are"):
        client.predict("cam-7", IMAGES, idempotency_key=key)
    assert server.requests == []


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf])
def test_a_bad_timeout_is_refused_before_anything_is_sent(client, server, timeout):
    with pytest.raises(ValueError, match=r"timeout is .* accepted are"):
        client.predict("cam-7", IMAGES, timeout=timeout)
    assert server.requests == []


def test_junk_images_are_refused_before_anything_is_sent(client, server):
    with pytest.raises(TypeError, match="a batch is"):
        client.predict("cam-7", 7)
    assert server.requests == []


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        ("127.0.0.1:8000", {}, "base_url"),
        ("ftp://host", {}, "base_url"),
        ("http://", {}, "base_url"),
        ("http://host:port", {}, "Invalid port"),
        ("http://host", {"timeout": 0}, "timeout"),
        ("http://host", {"max_retries": -1}, "max_retries"),
    ],
)
def test_bad_settings_are_refused_by_the_constructor(connect, base_url, options, message):
    with pytest.raises(ValueError, match=message):
        connect(base_url, **options)


def test_the_timeout_of_a_call_wins_over_that_of_the_client(connect, server, play):
    server.play(play.stall())
    with pytest.raises(Timeout):
        connect(server.url, max_retries=0).predict("cam-7", IMAGES, timeout=0.02)


def test_both_clients_have_the_same_methods_arguments_and_defaults():
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name in ("_run", "_probe"):
            continue
        twin = getattr(AsyncClient, {"__enter__": "__aenter__", "__exit__": "__aexit__"}.get(name, name))
        ours, theirs = inspect.signature(method), inspect.signature(twin)
        hidden = {"_sleep"}  # blocking in one, awaitable in the other
        assert [p for p in ours.parameters.values() if p.name not in hidden] == [
            p for p in theirs.parameters.values() if p.name not in hidden
        ], name
        if get_origin(ours.return_annotation) is Iterator:
            assert theirs.return_annotation == AsyncIterator[get_args(ours.return_annotation)], name
            continue
        assert ours.return_annotation == theirs.return_annotation, name
        assert name == "__init__" or inspect.iscoroutinefunction(twin), name


def test_async_has_no_public_method_that_the_blocking_client_lacks():
    def public(kind):
        return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    assert public(AsyncClient) == public(Client)


def test_every_exported_name_exists_once_in_order():
    names = [name for name in acclimate_client.__all__ if name != "__version__"]
    assert names == sorted(set(names))
    assert all(hasattr(acclimate_client, name) for name in names)
