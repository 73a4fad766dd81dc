"""Places for batches: bounded in all, and shared among the clients who want many."""

from contextlib import ExitStack, suppress

import pytest

from acclimate_service.clients.admission import Backlog, DynamicThreshold
from acclimate_service.errors import Problem


def take(admission, held, client, wanted=1000, caller=None):
    """Places that a client gets of so many that it wants; by default its caller has no other client."""
    before = admission.taken
    with suppress(Problem):
        for _ in range(wanted):
            held.enter_context(admission.hold(("model", caller or client, client)))
    return admission.taken - before


@pytest.mark.parametrize("floods", [1, 2, 3, 7])
def test_floods_share_the_places_and_leave_some_to_others(floods):
    admission = DynamicThreshold(256, "batches", few=8)
    with ExitStack() as held:
        for _ in range(256):  # in turn
            for flood in range(floods):
                take(admission, held, f"flood-{flood}", wanted=1)
        shares = [admission._taken["model", f"flood-{flood}", f"flood-{flood}"] for flood in range(floods)]
        assert min(shares) >= 256 // (floods + 1) - 1
        assert take(admission, held, "light", wanted=4) == 4


def test_the_only_client_gets_half_of_many_places_and_all_of_a_few():
    with ExitStack() as held:
        assert take(DynamicThreshold(256, "batches", few=8), held, "cam") == 128
        assert take(DynamicThreshold(8, "batches", few=8), held, "cam") == 8


@pytest.mark.parametrize(("room", "few"), [(256, 8), (8192, 0)])
def test_a_caller_of_any_number_of_clients_leaves_room_for_others(room, few):
    admission = DynamicThreshold(room, "batches", few=few)
    with ExitStack() as held:
        flooded = [take(admission, held, f"flood-{number}", wanted=1, caller="flood") for number in range(2 * room)]
        assert 0.75 * room <= sum(flooded) <= 0.81 * room
        assert take(admission, held, "light", wanted=room // 11) == room // 11
        with pytest.raises(Problem, match="batches of this caller are waiting already, and room for"):
            held.enter_context(admission.hold(("model", "flood", "one more")))


def test_places_that_are_given_back_are_free_again_and_leave_nothing_behind():
    admission = DynamicThreshold(1, "batches", few=8)
    for client in ("a", "b", "a"):
        refused = pytest.raises(Problem, match="1 batches are waiting already")
        with admission.hold(("m", "x", client)), refused, admission.hold(("m", "y", "c")):
            pass
    with pytest.raises(ZeroDivisionError), admission.hold(("m", "x", "a")):
        raise ZeroDivisionError
    assert not admission._taken
    assert admission.taken == 0


def waits(backlog, held, flow, seconds):
    """Take a place and keep it; what a refusal says, else None."""
    try:
        held.enter_context(backlog.hold(flow, seconds))
    except Problem as problem:
        return problem
    return None


def test_what_would_wait_longer_than_the_bound_is_told_when_it_would_not():
    backlog, flow = Backlog(2.0), ("caller", "cam")
    with ExitStack() as held:
        assert waits(backlog, held, flow, 9.0) is None, "it meets nobody"
        problem = waits(backlog, held, flow, 0.5)
        assert problem.code == "too_many_requests"
        assert problem.headers == {"Retry-After": "7"}
        assert "would wait about 9,000 ms for the device, and 2,000 ms are accepted" in problem.detail
    assert waits(backlog, held, flow, 0.5) is None
    held.close()
    assert not backlog._taken


@pytest.mark.parametrize("seconds", [0.5, 0.125])
def test_accepted_batches_of_equal_clients_wait_no_longer_than_the_bound(seconds):
    backlog = Backlog(2.0)
    with ExitStack() as held:
        taken = [waits(backlog, held, ("caller", f"{number}"), seconds) is None for number in range(100)]
    assert sum(taken) == 2 / seconds + 1  # the last one waits for all others


def test_a_flood_of_clients_of_one_caller_shuts_neither_others_out_nor_a_light_client_of_its_own():
    backlog = Backlog(2.0)
    with ExitStack() as held:
        while waits(backlog, held, ("flood", f"{len(backlog._taken)}"), 0.1) is None:
            pass
        assert waits(backlog, held, ("flood", "another"), 0.1) is not None
        assert waits(backlog, held, ("flood", "light"), 0.01) is None
        assert waits(backlog, held, ("other", "cam"), 1.0) is None


def test_a_client_that_floods_the_service_does_not_shut_others_out(
    make_replica, gate, pool, post, assert_problem, shade
):
    gate.shut = False
    replica = make_replica(adapter="gated", max_waiting=17)
    gate.shut = True
    image = shade(0)
    flood = []
    for number in range(9):
        flood.append(pool.submit(post, replica, "flood", image))
        replica.await_waiting(number + 1)
    refused = assert_problem(post(replica, "flood", image), 429, "too_many_requests")
    assert refused["detail"].startswith("9 batches of this client are waiting already, and room for 8 is kept")
    light = pool.submit(post, replica, "light", image)
    replica.await_waiting(10)
    gate.open()
    assert light.result().status_code == 200
    assert [reply.result().status_code for reply in flood] == [200] * 9


def test_a_tenant_has_so_many_clients_and_a_deleted_one_makes_room(make_replica, stream, post, assert_problem):
    replica, images = make_replica(max_clients=2, adapter="fedcal"), stream(0, 1)[0][:, 0]
    for client in ("one", "two", "one"):
        assert post(replica, client, images).status_code == 200
    for reply in (post(replica, "three", images), replica.http.put("/clients/three", json={"adapter": "none"})):
        assert "there are 2 clients, which is the most" in assert_problem(reply, 507, "store_full")["detail"]
    assert replica.keys("three") == {}
    assert post(replica, "three", images, "?adapt=false").status_code == 200, "nothing is kept of it"
    replica.http.delete("/clients/two")
    assert post(replica, "three", images).status_code == 200


def test_a_batch_waits_for_no_more_of_another_model_than_its_own_model_has():
    backlog = Backlog(2.0)
    with ExitStack() as held:
        for number in range(50):
            held.enter_context(backlog.hold(("busy", f"caller {number}", "cam"), 0.02))
        assert waits(backlog, held, ("quiet", "caller", "cam"), 1.9) is None
        assert waits(backlog, held, ("busy", "caller", "cam"), 2.9) is not None
