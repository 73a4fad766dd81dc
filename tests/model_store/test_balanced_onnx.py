"""`balanced` and `consensus` on ONNX Runtime answer as in torch, for one client and for several at once."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, State, Step
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.balanced.moments import source_moments
from acclimate_adapters.consensus import Consensus
from acclimate_store import Bundle, Catalogue, GraphError, load_streams
from acclimate_store.files import BALANCED_GRAPH, BLENDED_GRAPH, STEM_GRAPH
from acclimate_store.onnx_graphs import OnnxPasses, export_balanced, export_blended, export_stem

pytestmark = pytest.mark.integration

STORE = Path(__file__).parents[2] / "model_store"
SIZES = (20, 1, 7)


@pytest.fixture(scope="module")
def bundle(exported: Any) -> Bundle:
    torch.set_num_threads(1)
    return Catalogue(exported.root).load("tiny", "2")


@pytest.fixture(scope="module")
def graphs(exported: Any) -> tuple[bytes, ...]:
    return tuple((exported.root / "tiny/2" / file).read_bytes() for file in (STEM_GRAPH, BALANCED_GRAPH, BLENDED_GRAPH))


@pytest.fixture(scope="module")
def passes(bundle: Bundle, graphs: tuple[bytes, ...]) -> OnnxPasses:
    return OnnxPasses(*graphs, bundle.model, threads=1)


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
        assert one.signals.keys() == other.signals.keys()
        for name, value in other.signals.items():
            np.testing.assert_allclose(one.signals[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adapter", [Balanced(), Consensus()], ids=["balanced", "consensus"])
def test_answers_and_states_are_those_of_torch(
    adapter: Balanced | Consensus, bundle: Bundle, passes: OnnxPasses, rounds: list[list[Tensor]]
) -> None:
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


def test_without_a_graph_of_the_blended_pass_torch_runs_it(
    bundle: Bundle, graphs: tuple[bytes, ...], rounds: list[list[Tensor]]
) -> None:
    stem, bent, _ = graphs
    adapter, of_before = Consensus(), OnnxPasses(stem, bent, None, bundle.model, threads=1)
    states = [adapter.init(bundle.model) for _ in SIZES]
    assert_alike(*(adapter.step_many(bundle.model, states, rounds[0], by) for by in (None, of_before)))


def test_a_graph_of_another_model_is_refused(bundle: Bundle, graphs: tuple[bytes, ...]) -> None:
    net = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2), head=nn.Linear(2, 2))).eval()
    other = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))
    with pytest.raises(GraphError, match=f"that of model {bundle.model.content_hash}, not of {other.content_hash}"):
        OnnxPasses(*graphs, other)


class Skipping(nn.Module):
    """A network that goes on with what it gave to its first layer, which it writes to, and comes back to its images."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = first, nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
        self.last, self.head = nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(self.norm(y).relu())
        y = y.clone() if y is x else y
        y.mul_(2)
        features: Tensor = self.last(z + y + x).relu().mean((2, 3))
        return self.head(features)  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [nn.Conv2d(2, 2, 3, padding=1), nn.Identity()], ids=["convolution", "nothing"])
def test_whatever_a_network_does_with_its_stem_it_answers_as_in_torch(first: nn.Module) -> None:
    torch.manual_seed(0)
    net, prior = Skipping(first).eval(), torch.full((3,), 1 / 3)
    rows = torch.rand(60, 2, 6, 6), torch.arange(60) % 3
    bare = FrozenModel.from_module(net, classifier="head", source=Source(prior=prior))
    source = Source(prior=prior, moments=source_moments(bare, [rows]))
    model = FrozenModel.from_module(net, classifier="head", source=source)
    graphs = (export(model, (2, 6, 6)) for export in (export_stem, export_balanced, export_blended))
    passes, batches = (
        OnnxPasses(*graphs, model, threads=1),
        [torch.rand(20, 2, 6, 6) + 0.5, torch.rand(3, 2, 6, 6) - 0.5],
    )
    for adapter in (Balanced(), Consensus()):
        states = [adapter.init(model) for _ in batches]
        assert_alike(*(adapter.step_many(model, states, batches, by) for by in (None, passes)))


def test_a_network_without_batch_norm_has_no_such_graph() -> None:
    net = nn.Sequential(OrderedDict(flat=nn.Flatten(), head=nn.Linear(4, 2)))
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))
    for export in (export_stem, export_balanced, export_blended):
        with pytest.raises(GraphError, match="no BatchNorm layer to bend"):
            export(model, (1, 2, 2))
