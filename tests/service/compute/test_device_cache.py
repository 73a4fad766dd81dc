"""States on a device: a budget of their own, least recently used out first, and the same answers as ever."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from acclimate_adapters import State
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.device_cache import DeviceCache, device_bytes, to_host

MB = 2**20


def adapted(*sizes, device="meta"):
    tensors = {str(n): torch.empty(size, dtype=torch.uint8, device=device) for n, size in enumerate(sizes)}
    return ClientState("{}", State("atp", 1, "0" * 16, tensors=tensors))


def test_only_what_is_on_the_device_is_weighed():
    assert device_bytes(adapted(3, 4)) == 7
    assert device_bytes(adapted(3, 4, device="cpu")) == 0


def test_the_least_recently_used_leave_first_and_only_as_many_as_have_to():
    cache = DeviceCache(10)
    assert [cache.used(client, adapted(4)) for client in ("a", "b", "a")] == [[], [], []]
    assert cache.used("c", adapted(4)) == ["b"]
    assert cache.used("d", adapted(9)) == ["a", "c"]
    assert (len(cache), cache.nbytes) == (1, 9)


def test_a_state_without_room_leaves_at_once():
    cache = DeviceCache(10)
    cache.used("small", adapted(4))
    assert "large" in cache.used("large", adapted(11))
    assert cache.nbytes == 0


def test_a_client_that_is_gone_or_on_the_host_takes_no_room():
    cache = DeviceCache(10)
    cache.used("a", adapted(8))
    cache.used("b", adapted(2))
    cache.used("a", adapted(8, device="cpu"))
    cache.used("b", None)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_state_that_went_to_the_host_is_the_same():
    state = adapted(3, device="cpu")
    assert to_host(state).state.to_bytes() == state.state.to_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_state_leaves_a_cuda_device():
    state = adapted(3, device="cuda")
    moved = to_host(state)
    assert (device_bytes(state), device_bytes(moved)) == (3, 0)
    assert moved.state.to_bytes() == state.state.to_bytes()


def test_a_client_that_left_while_its_state_was_moved_is_weighed_by_what_it_has_when_it_is_back(make_replica, stream):
    moving, go_on, hosted = threading.Event(), threading.Event(), []

    def move(state):
        moving.set()
        assert go_on.wait(timeout=10)
        hosted.append(replace(state))
        return hosted[-1]

    def weigh(state):
        return 0 if any(state is moved for moved in hosted) else state.state.nbytes

    replica, (images,) = make_replica(), stream(0, 1)
    sessions = replica.service.sessions
    sessions._device_cache = cache = DeviceCache(MB // 2, weigh, move)  # room for one state

    async def leave():
        await sessions._leave("a")

    with replica.sdk() as sdk:
        sdk.predict("a", images)
        sdk.predict("b", images)
        assert moving.wait(timeout=10), "nobody moved the state of the first client"
        replica.run(leave())
        sdk.predict("a", images)
    nbytes = cache.nbytes
    go_on.set()
    settle(lambda: not sessions._tasks._running)
    assert (len(cache), cache.nbytes) == (1, nbytes)


def test_clients_that_take_turns_are_moved_and_answer_as_if_they_were_not(make_replica, stream):
    hosted = []

    def move(state):
        tensors = {name: tensor.clone() for name, tensor in state.state.tensors.items()}
        hosted.append(replace(state, state=replace(state.state, tensors=tensors)))
        return hosted[-1]

    def weigh(state):
        return 0 if any(state is moved for moved in hosted) else state.state.nbytes

    here, other = (make_replica(strict_replay=True) for _ in range(2))  # in one memory layout
    sessions = here.service.sessions
    sessions._device_cache = cache = DeviceCache(MB // 2, weigh, move)  # room for one state
    with here.sdk() as sdk, other.sdk() as plain:
        for images in stream(0, 3):
            for client in ("a", "b"):
                answer = sdk.predict(client, images)
                assert answer.confidence.tolist() == plain.predict(client, images).confidence.tolist()
    settle(lambda: len(hosted) >= 5)
    assert [moved.state.step for moved in hosted] == [1, 1, 2, 2, 3], "each turn moves the state of the other client"
    assert len(cache) == 1


def settle(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
