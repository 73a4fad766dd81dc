import torch

from acclimate_adapters import State
from acclimate_service.cache import Entry, StateCache
from acclimate_service.state import Basis


def entry(size=1000, touched=10.0):
    """An entry of `size` bytes of tensors."""
    return Entry(Basis(), "", State("none", 1, "0" * 16, tensors={"t": torch.zeros(size, dtype=torch.uint8)}), touched)


COST = entry().nbytes


def test_an_entry_costs_more_than_its_tensors():
    assert COST > 1000
    assert entry(0).nbytes > 0


def test_the_least_recently_used_goes_first():
    cache = StateCache(2 * COST)
    cache.put("a", entry())
    cache.put("b", entry())
    assert cache.get("a") is not None
    cache.put("c", entry())
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert cache.get("c") is not None


def test_the_budget_is_never_exceeded():
    cache = StateCache(3 * COST)
    for number in range(10_000):
        cache.put(f"one-shot-{number}", entry(number % 2000))
        assert cache.nbytes <= 3 * COST
    assert cache.nbytes == sum(cache.get(key).nbytes for key in list(cache._entries))


def test_replacing_and_dropping_entries_keeps_the_account():
    cache = StateCache(10 * COST)
    cache.put("a", entry(1000))
    cache.put("a", entry(2000))
    assert (len(cache), cache.nbytes) == (1, entry(2000).nbytes)
    cache.drop("a")
    cache.drop("a")
    assert (len(cache), cache.nbytes) == (0, 0)


def test_an_entry_larger_than_the_budget_is_not_kept_and_pushes_nobody_out():
    cache = StateCache(COST)
    cache.put("a", entry())
    cache.put("b", entry(5000))
    assert cache.get("b") is None
    assert cache.get("a") is not None


def test_a_client_whose_new_state_is_too_large_does_not_keep_the_old_one():
    cache = StateCache(COST)
    cache.put("a", entry())
    cache.put("a", entry(5000))
    assert cache.get("a") is None


def test_a_budget_of_0_keeps_nothing():
    cache = StateCache(0)
    cache.put("a", entry(0))
    assert len(cache) == 0


def test_an_entry_touched_too_long_ago_is_not_given():
    cache = StateCache(COST)
    cache.put("a", entry(touched=10.0))
    assert cache.get("a", younger_than=9.9) is not None
    assert cache.get("a", younger_than=10.1) is None
