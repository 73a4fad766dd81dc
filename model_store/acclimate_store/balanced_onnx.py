"""`balanced` on ONNX Runtime: a graph that takes the statistics of clients beside their images and gives their moments.

It is exported from the very passes that torch runs, so the method exists once. Needs onnxruntime, and onnxscript to
export.
"""

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim

from acclimate_adapters import FrozenModel
from acclimate_adapters.balanced_passes import Passed, Rows, Terms, bent_pass
from acclimate_adapters.moments import SourceMoments
from acclimate_store.errors import GraphError
from acclimate_store.onnx_export import export
from acclimate_store.onnx_sessions import MODEL, OnnxSession

INPUTS = (*Rows._fields, *Terms._fields)
OUTPUTS = Passed._fields[:-1]  # all but the names of the layers
LAYERS = "acclimate.layers"  # metadata: names of the layers in their order


class BentNetwork(nn.Module):
    """One pass as a function of tensors alone: from the fields of `Rows` and `Terms` to those of `Passed`."""

    def __init__(self, model: FrozenModel, source: SourceMoments) -> None:
        super().__init__()
        self._model, self._source = model, source
        self.eval()

    def passed(self, x: Tensor, client: Tensor, share: Tensor, *terms: Tensor) -> Passed:
        """The pass."""
        return bent_pass(self._model, self._source, Rows(x, client, share), Terms(*terms), _nothing)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What a graph can give of the pass: tensors only."""
        *tensors, _ = self.passed(*inputs)
        return tuple(tensors)


def export_balanced(model: FrozenModel, shape: Sequence[int]) -> bytes:
    """The graph of one pass, for any number of rows and clients.

    Args:
        model: in single precision, on the CPU.
        shape: C, H and W of its input.

    Raises:
        GraphError: the model has no BatchNorm layer, so that `balanced` takes no pass of its own.
        MissingSource: it has no class moments.
    """
    source = SourceMoments.of(model)
    if not source.widths:
        raise GraphError("the model has no BatchNorm layer to bend: `balanced` runs it as it is")
    network, inputs = BentNetwork(model, source), _example(source, source.prior.new_zeros(3, *shape))
    any_number, by_client = {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}
    shapes = ((any_number, any_number, any_number | by_client, by_client, by_client, *[any_number] * 3),)
    with torch.no_grad():
        layers = network.passed(*inputs).layers
    metadata = {MODEL: model.content_hash, LAYERS: json.dumps(layers)}
    return export(network, inputs, shapes, (INPUTS, OUTPUTS), metadata)


def _example(source: SourceMoments, x: Tensor) -> tuple[Tensor, ...]:
    """Inputs of two clients; no tensor twice, since the exporter would take both for one input."""
    rows = Rows.of([x[:1], x[1:]], source.prior)
    moments = (source.overall.unsqueeze(1).repeat(1, 2, 1) for _ in range(2))
    return *rows, *moments, *(source.prior.new_ones(2) for _ in range(3))


class OnnxPasses:
    """Runs a graph of `export_balanced`; to be given to `Balanced.step_many`. Arguments as of `OnnxSession`."""

    def __init__(self, graph: bytes, model: FrozenModel, threads: int | None = None) -> None:
        self._session = OnnxSession(graph, model, threads, awake=True)
        self._layers = tuple(json.loads(self._session.metadata[LAYERS]))

    def __call__(self, rows: Rows, terms: Terms) -> Passed:
        """As `Passes`."""
        noise = torch.zeros_like(terms.most) if terms.noise is None else terms.noise
        outputs = self._session.run(OUTPUTS, dict(zip(INPUTS, (*rows, *terms[:-1], noise), strict=True)))
        return Passed._make((*outputs, self._layers))


def _nothing() -> None:
    pass
