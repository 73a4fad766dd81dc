"""On a CUDA device: graphs are captured, give what plain calls give, and disturb nobody."""

import copy
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, create
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.graphs import CudaCapture, Graphs, Outcome
from acclimate_bench.cost.gpu_checks import METHODS, Place, check, differences, full_precision, images
from acclimate_bench.cost.report import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def model(device: torch.device) -> FrozenModel:
    return Place(device, replays=True).model()


@pytest.fixture
def plain(device: torch.device) -> FrozenModel:
    return Place(device).model()


def batches(model: FrozenModel, number: int) -> list[Tensor]:
    return [model.batch(x) for x in images(number)]


def test_the_device_computes_what_the_cpu_computes(device: torch.device) -> None:
    assert check(Report(), device, batches=10)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_through_graphs(method: str, model: FrozenModel, plain: FrozenModel) -> None:
    with full_precision():
        assert max(differences(method, plain, model, 10)) < 1e-3
    assert not model.graphs.failures


def test_the_three_passes_of_atp_are_captured_once_for_a_size(model: FrozenModel) -> None:
    adapter = create("atp")
    state = adapter.init(model)
    for x in batches(model, 6):
        state = adapter.step(model, state, x).state
        model.frozen(x)
    assert (model.graphs.captured, model.graphs.failures) == (3, {})


def test_sizes_share_the_graph_of_the_frozen_pass(model: FrozenModel, plain: FrozenModel) -> None:
    (x,) = batches(model, 1)
    for rows in (17, 18, 19, 20, 20):
        torch.testing.assert_close(model.frozen(x[:rows]).logits, plain.frozen(x[:rows]).logits, rtol=1e-3, atol=1e-3)
    assert model.graphs.captured == 1


def test_states_are_not_touched_by_later_replays(model: FrozenModel) -> None:
    adapter = create("atp")
    state, kept = adapter.init(model), []
    for x in batches(model, 8):
        state = adapter.step(model, state, x).state
        kept.append((state, state.to_bytes()))
    assert all(state.to_bytes() == earlier for state, earlier in kept)


def test_a_function_that_waits_for_the_device_is_called_plainly_and_the_device_goes_on(device: torch.device) -> None:
    def waits(arguments: Sequence[Tensor]) -> Outcome:
        return Outcome((arguments[0] * float(arguments[0].sum()),))

    graphs, x = Graphs(CudaCapture(device), patience=1), torch.ones(3, device=device)
    for _ in range(4):
        assert graphs.call("waits", waits, (x,)).tensors[0].tolist() == [3, 3, 3]
    assert list(graphs.failures) == ["waits"]
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    for _ in range(4):
        assert graphs.call("goes", lambda xs: Outcome((xs[0] + 1,)), (x,)).tensors[0].tolist() == [2, 2, 2]
    assert graphs.captured == 1


def test_on_another_stream_the_call_is_plain(device: torch.device, model: FrozenModel) -> None:
    (x,) = batches(model, 1)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(4):
            model.frozen(x)
    assert model.graphs.captured == 0


def test_a_graph_of_the_callers_own_may_hold_a_pass(device: torch.device, model: FrozenModel) -> None:
    (x,) = batches(model, 1)
    wanted = model.frozen(x).logits
    model.frozen(x)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        model.frozen(x)
    torch.cuda.current_stream(device).wait_stream(side)
    with torch.cuda.graph(graph):
        answer = model.frozen(x).logits
    graph.replay()
    torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-3)


def test_other_threads_may_use_the_device_during_a_capture(device: torch.device) -> None:
    ends = threading.Event()

    def read_and_write() -> None:
        while not ends.is_set():
            torch.rand(1000, device=device).cpu()

    thread = threading.Thread(target=read_and_write)
    thread.start()
    try:
        for _ in range(5):
            model = Place(device, replays=True).model()
            for x in batches(model, 3):
                direction(model, x)
            assert (model.graphs.captured, model.graphs.failures) == (1, {})
    finally:
        ends.set()
        thread.join()


def test_evicted_graphs_leave_the_others_alone(device: torch.device, plain: FrozenModel) -> None:
    graphs = Graphs(CudaCapture(device), capacity=2, patience=1)
    bundled = Place(device).model()
    net = copy.deepcopy(bundled._net)
    (x,) = batches(bundled, 1)

    def doubled(arguments: Sequence[Tensor]) -> Outcome:
        with torch.no_grad():
            return Outcome((2 * net(arguments[0]),))

    for _ in range(3):
        for rows in (5, 6, 7, 8):
            for _ in range(2):
                (found,) = graphs.call("doubled", doubled, (x[:rows],)).tensors
            torch.testing.assert_close(found, 2 * plain.frozen(x[:rows]).logits, rtol=1e-3, atol=1e-3)
    assert graphs.captured > 2
