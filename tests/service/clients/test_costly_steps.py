"""Steps that would take too long are refused, and those that may take long hold up nobody else."""

import socket
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from acclimate_adapters import ADAPTERS, State, Step
from acclimate_adapters.adapter import complete
from acclimate_adapters.state import Form

DEAR = {"adapter": "fedthe_plus", "hyperparameters": {"steps": 1000, "views": 256, "tuning_steps": 100}}
MEMO = {"adapter": "memo", "hyperparameters": {"views": 16}}


class Pauses:
    """What becomes of the steps of `slow`."""

    def __init__(self):
        self.begun, self.ended, self.go_on = threading.Event(), threading.Event(), threading.Event()


@dataclass(frozen=True, slots=True)
class Slow:
    """Takes a step in slices without end until it is let go on, from the second batch on."""

    name: ClassVar[str] = "slow"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()
    pauses: ClassVar[Pauses] = Pauses()

    def init(self, model):
        return State(self.name, self.layout, model.content_hash, tensors={"sum": torch.zeros(50_000)})

    def form(self, model, state):
        return {"sum": Form.of(torch.zeros(50_000))}

    def step(self, model, state, x):
        return complete(self.slices(model, state, x))

    def slices(self, model, state, x):
        frozen = model.frozen(model.batch(x))
        try:
            while state.step and not self.pauses.go_on.is_set():
                self.pauses.begun.set()
                time.sleep(0.001)
                yield
        finally:
            self.pauses.ended.set()
        return Step(frozen.logits, state.next({"sum": state.tensors["sum"] + 1}), {}, frozen.logits)


@pytest.fixture
def pauses(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "slow", Slow)
    Slow.pauses = Pauses()
    return Slow.pauses


@pytest.fixture
def images(stream):
    return stream(0, 1)[0][:, 0]


def test_hyperparameters_that_no_image_could_be_answered_under_are_refused_and_change_nothing(
    make_replica, post, images, assert_problem
):
    replica = make_replica(max_step_ms=1000)  # a fast machine takes 6 s
    post(replica, "dear", images)
    before = replica.keys("dear")
    problem = assert_problem(replica.http.put("/clients/dear", json=DEAR), 422, "step_too_costly")
    assert "configure the client with less of views, tuning_steps" in problem["detail"]
    assert not problem["retryable"]
    assert replica.keys("dear") == before
    assert_problem(replica.http.put("/clients/never-seen", json=DEAR), 422, "step_too_costly")
    assert replica.keys("never-seen") == {}


def test_a_batch_of_too_many_images_is_refused_and_one_of_fewer_is_answered(
    make_replica, post, stream, images, assert_problem
):
    replica = make_replica(max_step_ms=300)
    assert replica.http.put("/clients/cam", json=MEMO).status_code == 200
    many = stream(0, 1, size=256)[0][:, 0]
    for query in ("", "?adapt=false"):
        problem = assert_problem(post(replica, "cam", many, query), 422, "step_too_costly")
        assert "send at most" in problem["detail"]
    assert replica.http.get("/clients/cam").json()["state"]["version"] == 1
    assert post(replica, "cam", images[:2]).json()["state"]["version"] == 2


def test_what_was_accepted_under_a_larger_budget_is_computed_again_but_no_more_of_it(
    run_service, tmp_path, post, images, assert_problem
):
    settings = {"data_dir": tmp_path, "adapter": "none", "inline_max": 1, "drain_budget_s": 0}
    with run_service(**settings) as replica:
        chosen = {"adapter": "memo+fedcal", "hyperparameters": {"memo": {"views": 64, "steps": 10}}}
        assert replica.http.put("/clients/cam", json=chosen).status_code == 200
        assert post(replica, "cam", images[:1]).json()["state"]["version"] == 2
        assert replica.http.get("/clients/cam").json()["state"]["journal_entries"] == 1
    with run_service(**settings, max_step_ms=20) as replica:
        assert replica.http.get("/clients/cam/state").headers["etag"] == '"v2"'
        state = replica.http.get("/clients/cam/state").content
        assert_problem(post(replica, "cam", images[:1]), 422, "step_too_costly")
        put = replica.http.put("/clients/cam/state", content=state)
        assert_problem(put, 422, "step_too_costly")


def test_labelled_images_that_would_cost_too_much_are_refused(make_replica, post, images, assert_problem):
    replica = make_replica(max_step_ms=40, adapter="none")
    chosen = {"adapter": "fedthe", "hyperparameters": {"examples": 10_000}}
    assert replica.http.put("/clients/cam", json=chosen).status_code == 200
    labelled = {"images": images[:2].tolist(), "labels": [0, 1]}
    for path in ("enroll", "feedback"):
        reply = replica.http.post(f"/clients/cam/{path}", json=labelled)
        assert "less of examples" in assert_problem(reply, 422, "step_too_costly")["detail"]


def test_adapters_that_are_not_offered_are_neither_listed_nor_given(make_replica, assert_problem):
    replica = make_replica(adapters=("none", "atp", "fedcal"), adapter="atp")
    names = [each["name"] for each in replica.http.get("/adapters").json()["adapters"]]
    assert names == ["atp", "fedcal", "none", "atp+fedcal"]
    assert set(replica.http.get("/models").json()["models"][0]["adapters"]) == {"none", "atp", "fedcal"}
    assert replica.http.put("/clients/cam", json={"adapter": "atp+fedcal"}).status_code == 200
    for name in ("memo", "atp+em"):
        assert_problem(replica.http.put("/clients/cam", json={"adapter": name}), 403, "adapter_not_allowed")
    assert replica.http.get("/clients/cam").json()["adapter"] == "atp+fedcal"


@pytest.mark.parametrize("inline_max", [10_000_000, 1000], ids=["written whole", "by journal"])
def test_a_long_step_lets_others_pass_and_is_given_up_at_its_deadline(
    make_replica, post, images, pool, assert_problem, pauses, inline_max
):
    replica = make_replica(adapter="none", inline_max=inline_max)
    assert replica.http.put("/clients/long", json={"adapter": "slow"}).status_code == 200
    assert post(replica, "long", images).json()["state"]["version"] == 2
    pauses.ended.clear()
    held = pool.submit(post, replica, "long", images, X_Request_Timeout_Ms="3000")
    assert pauses.begun.wait(20)
    assert post(replica, "other", images).json()["state"]["version"] == 1
    assert not held.done(), "the other one waited for it"
    problem = assert_problem(held.result(), 504, "deadline_exceeded")
    assert problem["retryable"]
    assert pauses.ended.wait(20)
    pauses.go_on.set()
    assert post(replica, "long", images).json()["state"]["version"] == 3


def test_a_long_step_is_given_up_when_its_caller_leaves(make_replica, post, images, pauses):
    replica = make_replica(adapter="none")
    assert replica.http.put("/clients/long", json={"adapter": "slow"}).status_code == 200
    assert post(replica, "long", images).json()["state"]["version"] == 2
    pauses.ended.clear()
    address = replica.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = (
            f"POST /clients/long/predict HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/octet-stream\r\n"
            f"X-Tensor-Shape: {len(images)},28,28\r\nContent-Length: {images.nbytes}\r\n\r\n"
        )
        connection.sendall(head.encode() + images.tobytes())
        assert pauses.begun.wait(20)
        assert not pauses.ended.is_set()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closed by a reset
    assert pauses.ended.wait(20)
    pauses.go_on.set()
    assert post(replica, "long", images).json()["state"]["version"] == 3
