"""`balanced` on ONNX Runtime answers as in torch, for one client and for several at once."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, State, Step
from acclimate_adapters.balanced import Balanced
from acclimate_store import Bundle, Catalogue, GraphError, load_streams
from acclimate_store.balanced_onnx import OnnxPasses, export_balanced

STORE = Path(__file__).parents[2] / "model_store"
SIZES = (20, 1, 7)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.set_num_threads(1)
    return Catalogue(STORE / "bundles").load("fashion-cnn")


@pytest.fixture(scope="module")
def graph(bundle: Bundle) -> bytes:
    return export_balanced(bundle.model, bundle.manifest.input.shape)


@pytest.fixture(scope="module")
def passes(bundle: Bundle, graph: bytes) -> OnnxPasses:
    return OnnxPasses(graph, bundle.model, threads=1)


@pytest.fixture(scope="module")
def rounds(bundle: Bundle) -> list[list[Tensor]]:
    """Batches of three clients in three rounds; the first one is another client in the last round."""
    streams = load_streams(STORE / "samples/fashion-hybrid/streams.npz")
    batches = [[bundle.prepare(streams[c].images[20 * b : 20 * b + n]) for c, n in enumerate(SIZES)] for b in range(3)]
    batches[2][0] = bundle.prepare(255 - streams[1].images[:20])
    return batches


def assert_alike(some: Sequence[Step], others: Sequence[Step]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-5, atol=1e-5)
        for name, tensor in other.state.tensors.items():
            torch.testing.assert_close(one.state.tensors[name], tensor, rtol=1e-5, atol=1e-5)
        assert one.signals["restarted"] == other.signals["restarted"]
        np.testing.assert_allclose(one.signals["shrink"], other.signals["shrink"], rtol=0, atol=1e-5)


def test_answers_and_states_are_those_of_torch(bundle: Bundle, passes: OnnxPasses, rounds: list[list[Tensor]]) -> None:
    adapter = Balanced()
    states = [adapter.init(bundle.model) for _ in SIZES]
    for batches in rounds:
        in_torch = [adapter.step(bundle.model, s, x) for s, x in zip(states, batches, strict=True)]
        alone = [adapter.step_many(bundle.model, [s], [x], passes)[0] for s, x in zip(states, batches, strict=True)]
        together = adapter.step_many(bundle.model, states, batches, passes)
        assert_alike(alone, in_torch)
        assert_alike(together, in_torch)
        assert_alike(together, alone)
        states = [step.state for step in in_torch]
    assert [step.signals["restarted"] for step in in_torch] == [1, 0, 0]


def test_state_of_either_is_that_of_the_other(bundle: Bundle, passes: OnnxPasses, rounds: list[list[Tensor]]) -> None:
    adapter, (first, second, _) = Balanced(), (batches[0] for batches in rounds)
    state = adapter.step_many(bundle.model, [adapter.init(bundle.model)], [first], passes)[0].state
    moved = State.from_bytes(state.to_bytes())
    both = (adapter.step(bundle.model, moved, second), *adapter.step_many(bundle.model, [moved], [second], passes))
    assert_alike(both[:1], both[1:])


def test_a_graph_of_another_model_is_refused(bundle: Bundle, graph: bytes) -> None:
    net = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2), head=nn.Linear(2, 2))).eval()
    other = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))
    with pytest.raises(GraphError, match=f"that of model {bundle.model.content_hash}, not of {other.content_hash}"):
        OnnxPasses(graph, other)


def test_a_network_without_batch_norm_has_no_such_graph() -> None:
    net = nn.Sequential(OrderedDict(flat=nn.Flatten(), head=nn.Linear(4, 2)))
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))
    with pytest.raises(GraphError, match="no BatchNorm layer to bend"):
        export_balanced(model, (1, 2, 2))
