"""Graphs: which calls are captured, that a replay is the call, and that what it gives is the caller's own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.graphs import Captured, Function, Graphs, Outcome, filled, graphs_for


class InPlace:
    """Does on a CPU what a CUDA graph does: a replay reads and writes the memory of the capture, and nothing else."""

    def __init__(self) -> None:
        self.here = True

    def possible(self) -> bool:
        return self.here

    def __call__(self, function: Function, arguments: Sequence[Tensor]) -> Captured:
        inputs = tuple(argument.clone() for argument in arguments)
        outcome = function(inputs)

        def replay() -> None:
            for old, new in zip(outcome.tensors, function(inputs).tensors, strict=True):
                old.copy_(new)

        return Captured(inputs, outcome, replay)


class Counted:
    """Doubles a tensor, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, arguments: Sequence[Tensor]) -> Outcome:
        self.calls += 1
        return Outcome((2 * arguments[0],), (str(len(arguments[0])),))


def ones(*shape: int) -> tuple[Tensor, ...]:
    return (torch.ones(*shape),)


def test_a_cpu_calls_plainly() -> None:
    graphs, function = graphs_for(torch.device("cpu")), Counted()
    for _ in range(20):
        graphs.call("double", function, ones(3))
    assert (function.calls, graphs.captured, graphs.active) == (20, 0, False)


def test_a_call_is_captured_once_it_is_like_many_before_and_then_replayed() -> None:
    graphs, function = Graphs(InPlace(), patience=3), Counted()
    captured = []
    for n in range(6):
        outcome = graphs.call("double", function, (torch.full((3,), float(n)),))
        assert outcome.tensors[0].tolist() == [2.0 * n] * 3
        assert outcome.notes == ("3",)
        captured.append(graphs.captured)
    assert captured == [0, 0, 0, 1, 1, 1]


def test_what_a_replay_gives_is_not_touched_by_the_next() -> None:
    graphs = Graphs(InPlace(), patience=1)
    results = [graphs.call("double", Counted(), (torch.full((2,), float(n)),)).tensors[0] for n in range(4)]
    assert [int(result[0]) for result in results] == [0, 2, 4, 6]


def test_shape_type_and_key_make_calls_different() -> None:
    graphs = Graphs(InPlace(), patience=1)
    for _ in range(3):
        graphs.call("double", Counted(), ones(3))
        graphs.call("double", Counted(), ones(4))
        graphs.call("double", Counted(), (torch.ones(3, dtype=torch.float64),))
        assert graphs.call("other", lambda xs: Outcome((3 * xs[0],)), ones(3)).tensors[0][0] == 3
    assert graphs.captured == 4


def test_the_graph_used_longest_ago_goes_first() -> None:
    graphs = Graphs(InPlace(), capacity=2, patience=1)
    for size in (1, 1, 2, 2, 1, 3, 3):  # 2 was used before 1 when 3 comes
        graphs.call("double", Counted(), ones(size))
    assert graphs.captured == 3
    graphs.call("double", Counted(), ones(1))
    assert graphs.captured == 3, "the graph of 1 was kept"
    for _ in range(2):
        graphs.call("double", Counted(), ones(2))
    assert graphs.captured == 4, "the graph of 2 was not"


def test_many_sizes_that_come_once_are_never_captured() -> None:
    graphs = Graphs(InPlace(), patience=2)
    for _ in range(4):
        for size in range(1, 100):
            graphs.call("double", Counted(), ones(size))
    assert graphs.captured == 0


def test_a_function_that_cannot_be_captured_is_called_plainly_and_named() -> None:
    def refuse(function: Function, arguments: Sequence[Tensor]) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    capture = InPlace()
    capture.__class__ = type("Refusing", (InPlace,), {"__call__": staticmethod(refuse)})
    graphs, function = Graphs(capture, patience=1), Counted()
    for _ in range(5):
        assert graphs.call("double", function, ones(2)).tensors[0].tolist() == [2, 2]
    assert function.calls == 5
    assert graphs.failures == {"double": "RuntimeError: operation not permitted when stream is capturing"}


def test_where_no_capture_is_possible_the_call_is_plain() -> None:
    capture, function = InPlace(), Counted()
    graphs = Graphs(capture, patience=1)
    capture.here = False
    for _ in range(5):
        graphs.call("double", function, ones(2))
    assert (function.calls, graphs.captured) == (5, 0)


def test_what_the_function_raises_is_raised() -> None:
    def wrong(arguments: Sequence[Tensor]) -> Outcome:
        raise ValueError("no such batch")

    graphs = Graphs(InPlace(), patience=1)
    with pytest.raises(ValueError, match="no such batch"):
        graphs.call("wrong", wrong, ones(2))


def test_calls_that_raise_do_not_count_so_that_they_keep_nobody_from_a_capture() -> None:
    def refuse(arguments: Sequence[Tensor]) -> Outcome:
        raise ValueError("no such batch")

    graphs = Graphs(InPlace(), patience=2)
    for _ in range(5):
        with pytest.raises(ValueError, match="no such batch"):
            graphs.call("double", refuse, ones(2))
    for _ in range(3):
        graphs.call("double", Counted(), ones(2))
    assert (graphs.captured, graphs.failures) == (1, {})


def test_a_batch_is_filled_with_zeros_to_a_power_of_two() -> None:
    assert [len(filled(torch.ones(n, 2))) for n in (1, 2, 3, 4, 5, 8, 9, 33)] == [1, 2, 4, 4, 8, 8, 16, 64]
    assert filled(torch.ones(3, 1)).ravel().tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("name", ["none", "atp", "fedcal", "fedthe", "t3a", "surgical", "dynfed"])
def test_adapters_give_the_same_through_graphs(
    name: str,
    network: Any,
    model: FrozenModel,
    source_quantities: Any,
    streams: Tensor,
    follow: Callable[..., Any],
) -> None:
    graphs = Graphs(InPlace(), patience=1)
    source = Source(**source_quantities)
    replayed = FrozenModel.from_module(network, classifier="linear5", source=source, graphs=graphs)
    options = {"modules": ("linear5.weight",)} if name == "surgical" else {}
    pairs = zip(follow(name, model, streams[0], **options), follow(name, replayed, streams[0], **options), strict=True)
    for plain, step in pairs:
        torch.testing.assert_close(step.logits, plain.logits, rtol=1e-4, atol=1e-4)
        assert step.signals.keys() == plain.signals.keys()
        assert {k: t.shape for k, t in step.state.tensors.items()} == {
            k: t.shape for k, t in plain.state.tensors.items()
        }
    assert graphs.captured
    assert not graphs.failures


def test_states_that_came_out_of_graphs_are_never_changed(
    network: Any, source_quantities: Any, streams: Tensor
) -> None:
    source = Source(**source_quantities)
    graphs = Graphs(InPlace(), patience=1)
    replayed = FrozenModel.from_module(network, classifier="linear5", source=source, graphs=graphs)
    adapter = create("atp")
    state = adapter.init(replayed)
    kept = []
    for batch in streams[0]:
        state = adapter.step(replayed, state, batch).state
        kept.append((state, state.to_bytes()))
    assert all(state.to_bytes() == earlier for state, earlier in kept)


def test_graphs_work_in_inference_mode_too(network: Any, source_quantities: Any, streams: Tensor) -> None:
    source = Source(**source_quantities)
    graphs = Graphs(InPlace(), patience=1)
    replayed = FrozenModel.from_module(network, classifier="linear5", source=source, graphs=graphs)
    with torch.inference_mode():
        for _ in range(3):
            h = direction(replayed, replayed.batch(streams[0, 0]))
            replayed.frozen(streams[0, 0])
    assert not any(tensor.is_inference() for tensor in h.tensors.values())


def test_a_model_with_other_layouts_replays_graphs_of_its_own(
    network: Any, source_quantities: Any, streams: Tensor
) -> None:
    graphs = Graphs(InPlace(), patience=1)
    plain = FrozenModel.from_module(network, classifier="linear5", source=Source(**source_quantities), graphs=graphs)
    other = plain.with_layouts(frozen=True, adapted=True)
    for model in (plain, other):
        for _ in range(3):
            model.frozen(streams[0, 0])
    assert (plain.graphs.captured, other.graphs.captured) == (1, 1)
