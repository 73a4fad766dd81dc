"""What became of a client: noted once with each change, thinner with age, and gone with the client."""

from functools import reduce

import pytest
from checker.toy import LARGE, PROBE, Toy, batch_of

from acclimate_service.state import Point, Policy, StateCorrupt, coarser, event
from acclimate_service.state.timeline import EVERY, RATIO, grouped

SIZES = pytest.mark.parametrize("size", [40, LARGE], ids=["whole", "by journal"])
NOTED = Policy("{}", timeline=True)


async def points(replica, latest: int = 0) -> list[Point]:
    await replica.settled()
    found = await replica.store.timeline.read(replica.client, replica.model, latest)
    return found[1] if found else []


async def versions(replica) -> list[int]:
    return [point.version for point in await points(replica)]


def batches(*versions: int) -> list[Point]:
    return [Point(version, 1000.0 * version, 1, 10, {"entropy": float(version)}) for version in versions]


@SIZES
async def test_each_batch_is_noted_with_its_version_and_time(make_replica, size: int):
    replica = make_replica(size, policy=NOTED)
    for payload in (b"1", b"2", b"3"):
        await replica.apply(payload)
    found = await points(replica)
    assert [(point.version, point.batches, point.rows) for point in found] == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert found[0].at_ms < found[1].at_ms < found[2].at_ms
    assert len({point.measured["digest"] for point in found}) == 3


@SIZES
async def test_a_batch_is_noted_in_the_exchange_that_stores_it_or_its_answer(make_replica, monkeypatch, size: int):
    replica = make_replica(size, policy=NOTED)
    await replica.apply(b"1")
    await replica.settled()
    sent, run = [], replica.store._wire.run
    monkeypatch.setattr(
        replica.store._wire, "run", lambda script, keys, args: sent.append(script.name) or run(script, keys, args)
    )
    await replica.apply(b"2")
    assert await versions(replica) == [1, 2]
    assert sent[:-1] == (["commit"] if size == 40 else ["append", "answer"])


@SIZES
async def test_nothing_is_noted_where_nobody_asks_for_it(make_replica, admin, size: int):
    replica = make_replica(size)
    await replica.apply(b"1")
    await replica.session.reset(replica.request(), point=event("reset"))
    await replica.settled()
    assert not await admin.exists(replica.client.timeline(replica.model))
    assert not await admin.hexists(replica.client.head(replica.model), "ts")


async def test_a_journal_that_is_computed_again_notes_nothing_twice(make_replica, admin):
    one, two = (make_replica(LARGE, policy=NOTED, snapshot_entries=100) for _ in range(2))
    for payload in (b"1", b"2", b"3"):
        await one.apply(payload)
    await one.settled()
    await admin.delete(*one.client.requests[3:])  # as if answers had to make room: they are stored anew
    await two.apply(b"4")
    assert await versions(two) == [1, 2, 3, 4]


async def test_what_a_replica_that_died_left_unnoted_the_next_one_notes(make_replica, monkeypatch):
    one, two = (make_replica(LARGE, policy=NOTED, snapshot_entries=100) for _ in range(2))
    await one.apply(b"1")
    await one.settled()
    monkeypatch.setattr(one.store.journal, "answer", lambda *_: asyncio_never())
    await one.apply(b"2")
    await two.apply(b"3")
    assert await versions(two) == [1, 2, 3]


async def asyncio_never() -> None:
    raise ConnectionError("nobody hears it")


@SIZES
async def test_a_repeated_batch_is_noted_once(make_replica, size: int):
    replica = make_replica(size, policy=NOTED)
    await replica.apply(b"1", key="k")
    await replica.settled()
    assert (await replica.apply(b"1", key="k")).replayed == "stored"
    assert await versions(replica) == [1]


@SIZES
async def test_a_takeover_is_an_event_that_names_who_had_the_client_before(make_replica, size: int):
    one, two = (make_replica(size, policy=NOTED) for _ in range(2))
    await one.apply(b"1")
    await one.settled()
    await two.apply(b"2")
    await two.apply(b"3")
    found = await points(two)
    assert [dict(point.events) for point in found] == [{}, {"takeover": 1}, {}]
    assert found[1].replica == one.session._context.nonce


@SIZES
async def test_a_reset_is_an_event(make_replica, size: int):
    replica = make_replica(size, policy=NOTED)
    await replica.apply(b"1")
    await replica.settled()
    await replica.session.reset(replica.request(), point=event("reset"))
    await replica.apply(b"3")
    assert [(p.version, p.batches, dict(p.events)) for p in await points(replica)] == [
        (1, 1, {}),
        (2, 0, {"reset": 1}),
        (3, 1, {}),
    ]


@SIZES
async def test_it_ends_with_the_client(make_replica, admin, size: int):
    replica = make_replica(size, policy=NOTED)
    await replica.apply(b"1")
    await replica.settled()
    assert await admin.exists(replica.client.timeline(replica.model))
    await replica.session.delete()
    assert not await admin.exists(replica.client.timeline(replica.model))
    assert await replica.store.timeline.read(replica.client, replica.model) is None
    await replica.apply(b"again")
    assert await versions(replica) == [1]


@SIZES
async def test_it_lives_as_long_as_the_state_and_begins_anew_with_it(make_replica, admin, size: int):
    replica = make_replica(size, policy=NOTED, state_ttl_ms=100_000)
    await replica.apply(b"1")
    await replica.settled()
    timeline, head = replica.client.timeline(replica.model), replica.client.head(replica.model)
    assert 100_000 < await admin.pttl(timeline) <= 150_000
    await admin.pexpire(timeline, 1000)
    await admin.pexpire(head, 40_000)
    await replica.store.load(replica.client, replica.model, sid=(await replica.head()).sid)
    assert await admin.pttl(timeline) > 100_000
    await admin.delete(head)
    replica.session.drop()
    await replica.apply(b"1")
    assert await versions(replica) == [1]


async def test_it_lives_no_longer_than_what_a_delete_finds_it_by(make_replica, admin, monkeypatch):
    """Half a life passes between a batch and its answer, which notes it."""
    replica = make_replica(LARGE, policy=NOTED)
    run = replica.store._wire.run

    async def age_before_the_answer(script, keys, args):
        if script.name == "answer":
            await admin.pexpire(replica.client.registry, 60_000)
        return await run(script, keys, args)

    await replica.apply(b"1")
    await replica.settled()
    monkeypatch.setattr(replica.store._wire, "run", age_before_the_answer)
    await replica.apply(b"2")
    assert await versions(replica) == [1, 2]
    assert 0 < await admin.pttl(replica.client.timeline(replica.model)) <= 60_000


async def test_a_list_that_is_never_thinned_out_has_a_last_bound(make_replica, monkeypatch):
    replica = make_replica(policy=NOTED, timeline_points=5)
    for payload in range(8):
        await replica.apply(b"%d" % payload)
    assert await versions(replica) == [4, 5, 6, 7, 8]
    assert [point.version for point in await points(replica, latest=2)] == [7, 8]


@SIZES
async def test_it_is_thinned_out_beside_the_batches(make_replica, size: int):
    replica = make_replica(size, policy=NOTED)
    count = EVERY + RATIO
    for payload in range(count):
        await replica.apply(b"%d" % payload)
    await replica.settled()
    found = await points(replica)
    assert sum(point.batches for point in found) == sum(point.rows for point in found) == count
    assert [point.version for point in found][-RATIO:] == [*range(count - RATIO + 1, count + 1)]
    assert len(found) < count
    assert max(point.batches for point in found) > 1


async def test_it_is_thinned_out_though_a_reset_had_the_version_at_which_it_is_due(make_replica):
    replica = make_replica(policy=NOTED)
    for payload in range(EVERY - 1):
        await replica.apply(b"%d" % payload)
    assert (await replica.session.reset(replica.request())).seq == EVERY
    assert len(await points(replica)) >= EVERY - 1
    await replica.apply(b"after")
    await replica.settled()
    assert len(await points(replica)) < EVERY - 1


async def test_two_replicas_that_thin_out_at_once_lose_nothing(make_replica, monkeypatch):
    one, two = (make_replica(policy=NOTED) for _ in range(2))
    for payload in range(EVERY + 2 * RATIO):
        await one.apply(b"%d" % payload)
    await one.settled()
    before, read = await points(one), two.store._wire.read

    async def late(*command, **options):
        found = await read(*command, **options)
        await one.store.timeline.thin(one.client, one.model)
        return found

    monkeypatch.setattr(two.store._wire, "read", late)
    await two.store.timeline.thin(two.client, two.model)
    after = await points(one)
    assert len(after) < len(before)
    assert sum(point.batches for point in after) == sum(point.batches for point in before)


async def test_labels_of_a_look_note_nothing(make_replica):
    replica = make_replica(policy=NOTED)
    await replica.apply(b"1")
    await replica.session.look(batch_of(PROBE))
    assert await versions(replica) == [1]


async def test_a_point_that_cannot_be_read_is_said(make_replica, admin):
    replica = make_replica(policy=NOTED)
    await replica.apply(b"1")
    await admin.rpush(replica.client.timeline(replica.model), "nonsense")
    with pytest.raises(StateCorrupt, match="timeline"):
        await points(replica)


async def test_a_failing_step_is_not_noted(make_replica):
    machine = Toy(lambda count: LARGE)
    replica = make_replica(machine=machine, policy=NOTED)
    await replica.apply(b"1")
    machine.fails = lambda: True
    with pytest.raises(Exception, match="failed"):
        await replica.apply(b"2")
    machine.fails = lambda: False
    await replica.apply(b"3")
    assert await versions(replica) == [1, 2]


@pytest.mark.parametrize("count", [1, 10, 1000, 20_000])
def test_points_grow_with_the_logarithm_of_the_batches(count: int):
    found: list[Point] = []
    for version in range(1, count + 1):
        found += batches(version)
        if version % EVERY == 0:
            groups = grouped([point.batches for point in found])
            found = [reduce(Point.then, found[group.start : group.stop]) for group in groups]
    expected = {1: 1, 10: 10}.get(count)
    assert sum(point.batches for point in found) == count
    assert [point.version for point in found] == sorted({point.version for point in found})
    assert len(found) == expected if expected else RATIO < len(found) < 16 * RATIO
    after = 0
    for point in reversed(found):
        assert point.batches <= max(1, after // RATIO)
        after += point.batches


def test_several_points_are_one_of_their_mean():
    one = Point(
        1, 1.0, 1, 20, {"entropy": 1.0, "prior": [0.2, 0.8], "modules": {"a": 1.0}}, {"skipped": 1}, "undecided"
    )
    two = Point(4, 2.0, 3, 40, {"entropy": 2.0, "prior": [0.6, 0.4], "agreement": 0.5}, {"skipped": 2, "reset": 1}, "")
    both = one.then(two)
    assert (both.version, both.at_ms, both.batches, both.rows, both.verdict) == (4, 2.0, 4, 60, "undecided")
    assert both.measured == {
        "entropy": 1.75,
        "prior": pytest.approx([0.5, 0.5]),
        "modules": {"a": 1.0},
        "agreement": 0.5,
    }
    assert both.events == {"skipped": 3, "reset": 1}


def test_a_point_is_read_as_it_was_stored():
    point = Point(
        7, 1234.5, 2, 40, {"entropy": 1.234, "prior": [0.25, 0.75], "modules": {"a": 0.001}}, {"reset": 2}, "trusted"
    )
    assert Point.decode(point.store()) == point


def test_numbers_that_are_none_are_left_out():
    stored = Point(1, 1.0, 1, 1, {"entropy": float("nan"), "shift": 0.5}).store()
    assert Point.decode(stored).measured == {"shift": 0.5}


def test_a_coarser_timeline_has_one_point_for_each_interval():
    found = coarser(batches(0, 1, 2, 3, 9, 10, 11), 5.0)
    assert [(point.version, point.batches) for point in found] == [(3, 4), (9, 1), (11, 2)]
