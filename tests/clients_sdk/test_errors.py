"""The error tree: as drawn, complete, and told apart by code."""

import contextlib
import copy
import inspect
import json
import pickle
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_client import _replies, errors
from acclimate_client._problems import from_httpx, problem
from acclimate_client.errors import (
    PROBLEMS,
    AcclimateClientError,
    ConnectionFailed,
    ProblemError,
    Timeout,
    UnexpectedReplyError,
)

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AcclimateClientError)]
REQUEST = httpx.Request("POST", "http://host/clients/cam-7/predict")


def answer(status, body):
    return httpx.Response(status, content=json.dumps(body).encode(), request=REQUEST)


def test_the_tree_is_drawn_as_it_is_down_to_the_codes():
    drawn, parents = {}, []
    for indent, name in re.findall(r"^( *)(?:\+ )?(\w+)$", errors.__doc__.split("\n", 1)[1], re.MULTILINE):
        depth = len(indent) // 2
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in CLASSES if kind.__base__ is not ProblemError}


def test_every_problem_class_stands_for_one_code_and_is_named_after_it():
    assert set(PROBLEMS.values()) == set(ProblemError.__subclasses__())
    for code, kind in PROBLEMS.items():
        assert kind.__name__ == "".join(word.capitalize() for word in code.split("_")) + "Error"
        assert re.match(rf"`{code}` \([45]\d\d\): ", kind.__doc__)


def test_each_code_raises_its_class_over_http(client, server, play):
    for code, kind in PROBLEMS.items():
        status = int(re.search(r"\((\d+)\)", kind.__doc__)[1])
        server.play(play.problem(code, status, retryable=False, state_committed=False, later={"a": 1}))
        with pytest.raises(kind) as caught:
            client.reset("cam-7")
        error = caught.value
        assert (error.code, error.status, error.detail, error.retryable) == (code, status, f"about {code}", False)
        assert (error.request_id, error.state_committed, error.retry_after) == ("r-1", False, None)


def test_a_code_of_a_later_version_is_a_plain_problem():
    error = problem(answer(418, {"code": "teapot", "detail": "short and stout", "retryable": True}))
    assert type(error) is ProblemError
    assert (error.code, error.retryable, error.state_committed) == ("teapot", True, "unknown")


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (404, False), (408, True), (409, False), (429, True), (500, True), (502, True)],
)
def test_without_a_problem_body_the_status_decides(status, retryable):
    error = problem(httpx.Response(status, text="<h1>proxy</h1>", headers={"X-Request-Id": "r-2"}, request=REQUEST))
    assert (error.code, error.detail, error.retryable) == (f"http_{status}", "<h1>proxy</h1>", retryable)
    assert error.request_id == "r-2"


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])  # noqa: S301 - own
def test_errors_survive_copies_and_pickling(copied):
    error = problem(answer(422, {"code": "wrong_shape", "detail": "28x28 expected", "retryable": False}))
    error.idempotency_key = "k"
    twin = copied(error)
    assert type(twin) is type(error)
    assert (str(twin), twin.idempotency_key, twin.status) == (str(error), "k", 422)


def concrete(kind):
    return [kind] if not kind.__subclasses__() else [leaf for sub in kind.__subclasses__() for leaf in concrete(sub)]


@pytest.mark.parametrize("kind", concrete(httpx.RequestError))
def test_every_error_of_the_transport_is_translated(kind):
    error = from_httpx(kind("", request=REQUEST))
    expected = Timeout if issubclass(kind, httpx.TimeoutException) else ConnectionFailed
    assert type(error) is expected
    assert str(error) == f"POST http://host/clients/cam-7/predict: {kind.__name__}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    [
        "client_id",
        "model",
        "adapter",
        "predictions",
        "probabilities",
        "state",
        "signals",
        "key_expires_at_earliest",
        "guard",
    ]
)
HEALTHY = {
    "client_id": "cam-7",
    "model": {"name": "m", "version": "1"},
    "adapter": "atp",
    "predictions": [{"index": 3, "label": "Dress", "probability": 0.5}],
    "state": {"version": 1, "status": "warm", "committed": True, "replayed": "none"},
}


@given(changes=st.dictionaries(MEMBERS, JSON, min_size=1), status=st.sampled_from([200, 404, 503]))
def test_whatever_json_comes_back_it_is_a_prediction_or_the_error_that_fits(changes, status):
    allowed = UnexpectedReplyError if status == 200 else ProblemError
    with contextlib.suppress(allowed):
        assert _replies.read_prediction(answer(status, HEALTHY | changes), "k").idempotency_key == "k"


@given(body=JSON | st.dictionaries(st.sampled_from(["code", "detail", "retryable", "state_committed"]), JSON))
def test_whatever_a_failure_looks_like_it_is_a_problem(body):
    error = problem(answer(500, body))
    assert isinstance(error, ProblemError)
    assert error.status == 500
    assert str(error)
