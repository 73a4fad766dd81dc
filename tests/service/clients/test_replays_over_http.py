"""What callers meet whose client's state is computed again from its journal."""

import asyncio
import threading

from acclimate_service.state import always

REPLAYED = "acclimate_state_replayed_batches_total"


def held_up(replica) -> threading.Event:
    """Keep the replica's torch thread busy until the event is set, with work that is too short to be overtaken."""
    busy, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        busy.wait(20)

    held = replica.service.worker.share(lambda works: [wait()], None, None, always, seconds=0.0)
    asyncio.run_coroutine_threadsafe(held, replica.loop)
    assert begun.wait(20)
    return busy


def test_who_gives_up_is_told_how_long_a_replay_takes_and_it_goes_on(make_replica, post, stream, assert_problem):
    first = make_replica()
    batches = [images[:, 0] for images in stream(0, 4)]
    for images in batches[:3]:
        assert post(first, "cam", images).status_code == 200
    second = make_replica(redis_url=first.service.settings.redis_url)
    busy = held_up(second)
    for _ in range(2):
        late = post(second, "cam", batches[3], X_Request_Timeout_Ms="300")
        problem = assert_problem(late, 504, "deadline_exceeded")
        assert "computed again from its journal, which goes on" in problem["detail"]
        assert problem["state_committed"] is False
        assert int(late.headers["retry-after"]) >= 1
    busy.set()
    assert post(second, "cam", batches[3]).json()["state"]["version"] == 4
    assert second.metric(REPLAYED) == 3
    assert second.service.sessions.nbytes > 300_000, "the state that was computed for nobody is accounted for"


def test_an_interruption_of_what_replicas_say_computes_nothing_again(make_replica, post, stream):
    replica = make_replica()
    batches = [images[:, 0] for images in stream(0, 4)]
    for images in batches[:3]:
        assert post(replica, "cam", images).status_code == 200
    replica.redis.client_kill_filter(_type="pubsub")
    replica.loop.call_soon_threadsafe(replica.service.sessions.check_all)
    reply = post(replica, "cam", batches[3]).json()
    assert (reply["state"]["version"], reply["state"]["status"]) == (4, "warm")
    assert replica.metric(REPLAYED) == 0
