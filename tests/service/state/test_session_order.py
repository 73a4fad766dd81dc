"""A caller may number the batches of a stream: each is then applied in its order, or not at all."""

from dataclasses import replace

import pytest
from checker.toy import LARGE, PROBE, Toy, ToyFailure, advance, answer_after, answer_of, initial, rework
from journal_owner import owner_of

from acclimate_service.state import OutOfOrder, Policy, StepFailed

SIZES = pytest.mark.parametrize("size", [40, LARGE])


@SIZES
@pytest.mark.parametrize("warm", [True, False])
async def test_out_of_order_batches_are_refused_and_change_nothing(make_replica, dump, size: int, warm: bool):
    one = make_replica(size)
    await one.apply(b"7", number=7)
    await one.settled()
    asked, before = one if warm else make_replica(size), await dump()
    for number in (4, 7):
        with pytest.raises(OutOfOrder, match=f"batch {number} comes after batch 7 .* nothing was changed") as late:
            await asked.apply(b"4", number=number)
        assert late.value.committed is False
    assert await dump() == before
    assert (await one.apply(b"8", number=8)).answer == answer_after(b"7", b"8")


@SIZES
async def test_out_of_order_batches_that_were_applied_before_get_their_first_answer(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    first = await one.apply(b"1", key="k", number=1)
    await one.apply(b"2", number=2)
    for replica in (one, two):
        again = await replica.apply(b"1", key="k", number=1)
        assert (again.seq, again.answer, again.replayed) == (1, first.answer, "stored")


@SIZES
async def test_out_of_order_batches_are_refused_on_a_replica_that_remembers_an_older_state(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    await one.apply(b"1", number=1)
    await two.apply(b"2", number=2)
    await two.apply(b"3", number=3)
    with pytest.raises(OutOfOrder, match="after batch 3"):
        await one.apply(b"2", number=2)  # in order after the state it remembers, so only the write tells
    assert await one.seen() == (3, answer_after(b"1", b"2", b"3", PROBE))


@SIZES
async def test_out_of_order_batches_are_refused_if_the_batch_before_them_lands_while_the_journal_is_opened(
    make_replica, size: int
):
    one, two = make_replica(size), make_replica(size)
    await one.apply(b"1", number=1)
    store, open_journal = two.store, two.store.journal.open

    async def overtaken(*arguments, **options):
        store.journal.open = open_journal
        await one.apply(b"3", number=3)
        return await open_journal(*arguments, **options)

    store.journal.open = overtaken
    if size == LARGE:
        with pytest.raises(OutOfOrder, match="batch 2 comes after batch 3"):
            await two.apply(b"2", number=2)
        assert await one.seen() == (2, answer_of(advance(advance(advance(initial("{}"), b"1"), b"3", 1), PROBE)))
    else:
        assert (await two.apply(b"2", number=2)).seq == 2  # nothing is opened


@SIZES
async def test_batches_that_are_missing_are_counted_in_the_answer_and_in_its_replay(make_replica, size: int):
    one = make_replica(size)
    await one.apply(b"3", number=3)  # the first one a client sends may have any number
    applied = await one.apply(b"7", key="k", number=7)
    expected = advance(advance(initial("{}"), b"3"), b"7", 3)
    assert applied.answer == answer_of(expected)
    assert await make_replica(size).seen() == (2, answer_of(advance(expected, PROBE)))


@SIZES
async def test_a_batch_without_a_number_leaves_the_number_as_it_is(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    await one.apply(b"1", number=1)
    await one.apply(b"none")
    assert (await one.head()).number == 1
    assert (await two.apply(b"2", number=2)).answer == answer_after(b"1", b"none", b"2")
    assert (await two.head()).number == 2


@SIZES
async def test_out_of_order_batches_stay_so_after_a_reset_and_a_change_of_the_whole_state(make_replica, size: int):
    replica = make_replica(size)
    await replica.apply(b"5", number=5)
    await replica.session.reset(replica.request())
    with pytest.raises(OutOfOrder):
        await replica.apply(b"5", number=5)
    await replica.rework(b"other")
    with pytest.raises(OutOfOrder):
        await replica.apply(b"5", number=5)
    expected = advance(rework(initial("{}"), b"other"), b"6")
    assert (await replica.apply(b"6", number=6)).answer == answer_of(expected)


@SIZES
async def test_a_deleted_client_may_count_from_the_beginning(make_replica, size: int):
    replica = make_replica(size)
    await replica.apply(b"5", number=5)
    await replica.session.delete()
    assert (await replica.apply(b"1", number=1)).answer == answer_after(b"1")
    assert (await replica.head()).number == 1


@SIZES
async def test_a_batch_whose_step_failed_may_come_again_under_its_number(make_replica, size: int):
    machine = Toy(lambda count: size)
    one = make_replica(machine=machine)
    await one.apply(b"1", number=1)
    machine.fails = lambda: True
    with pytest.raises(StepFailed) as failed:
        await one.apply(b"2", number=2)
    assert failed.value.committed is False
    assert (await one.head()).number == 1
    machine.fails = lambda: False
    assert (await make_replica(size).apply(b"2", number=2)).answer == answer_after(b"1", b"2")


async def test_an_entry_taken_back_gives_its_number_back(make_driver):
    owner = await owner_of(make_driver())
    for number in (4, 9):
        before, attempt = owner.basis, replace(owner.driver.attempt(), number=number)
        await owner.append(attempt=attempt)
    assert (await owner.driver.load()).head.number == 9
    await owner.undo(before, attempt, number=4)
    assert (await owner.driver.load()).head.number == 4


async def test_a_head_without_a_number_is_read(make_replica, admin):
    replica = make_replica()
    await replica.apply(b"1", number=1)
    await admin.hdel(replica.client.head(replica.model), "num")
    assert (await replica.head()).number == 0
    assert (await make_replica().apply(b"2", number=1)).seq == 2


async def test_without_a_journal_numbers_are_kept_too(make_replica):
    replica = make_replica(LARGE, policy=Policy("{}", journal=False))
    await replica.apply(b"2", number=2)
    with pytest.raises(OutOfOrder):
        await make_replica(LARGE).apply(b"1", number=1)


async def test_each_model_counts_for_itself(make_replica):
    one, other = make_replica(), make_replica(model="f" * 16)
    await one.apply(b"5", number=5)
    assert (await other.apply(b"1", number=1)).seq == 1


async def test_out_of_order_batches_are_refused_before_the_journal_is_opened(make_replica):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"2", number=2)
    with pytest.raises(OutOfOrder):
        await two.apply(b"1", number=1)
    assert two.events == []
    assert (await one.apply(b"3", number=3)).status == "warm"


async def test_out_of_order_says_nothing_of_a_batch_that_was_never_begun(make_replica):
    replica = make_replica()
    replica.machine.fails = lambda: True
    with pytest.raises(StepFailed) as failed:
        await replica.apply(b"3", number=3)
    assert isinstance(failed.value.__cause__, ToyFailure)
    replica.machine.fails = lambda: False
    assert (await replica.apply(b"2", number=2)).seq == 1
