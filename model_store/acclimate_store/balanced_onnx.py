"""`balanced` on ONNX Runtime: a graph that takes the statistics of clients beside their images and gives their moments.

What comes before the first BatchNorm layer is a graph of its own, since both passes over a batch share it. They are
exported from the very passes that torch runs, so the method exists once. Needs onnxruntime, and onnxscript to export.
"""

import json
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import Dim

from acclimate_adapters import FrozenModel
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import Passed, Rows, Run, StemOutput, Terms, bent_pass
from acclimate_adapters.network.probes import Norm
from acclimate_store.errors import GraphError
from acclimate_store.onnx_export import export
from acclimate_store.onnx_sessions import MODEL, OnnxSession

STEM = tuple(f"stem_{field}" for field in StemOutput._fields)
INPUTS = (*STEM, *Rows._fields, *Terms._fields)
OUTPUTS = Passed._fields[:-1]  # all but the names of the layers
LAYERS = "acclimate.layers"  # metadata: names of the layers in their order


class BeforeNorms(nn.Module):
    """What a network computes of a batch before its first BatchNorm layer."""

    def __init__(self, model: FrozenModel) -> None:
        super().__init__()
        self._model = model
        self.eval()

    def forward(self, x: Tensor) -> StemOutput:
        """The input of that layer, and its sums."""
        given: list[Tensor] = []

        def note(norm: Norm, x: Tensor) -> Tensor:
            given.append(x.clone())  # the network may yet write to it
            return norm.by_statistics(x, norm.running_mean, norm.running_var)

        self._model.run(x, normalise=note)
        return StemOutput.of(given[0])


class BentNetwork(nn.Module):
    """One pass as a function of tensors, from the fields of `StemOutput`, `Rows` and `Terms` to those of `Passed`.

    Of the images it needs only what the network uses anew after its first BatchNorm layer.
    """

    def __init__(self, model: FrozenModel, source: SourceMoments) -> None:
        super().__init__()
        self._model, self._source = model, source
        self.eval()

    def passed(self, *inputs: Tensor) -> Passed:
        """The pass."""
        stem, rows, terms = StemOutput(*inputs[:3]), Rows(*inputs[3:6]), Terms(*inputs[6:])
        return bent_pass(self._model, self._source, rows, terms, lambda _: stem)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What a graph can give of the pass: tensors only."""
        *tensors, _ = self.passed(*inputs)
        return tuple(tensors)


def export_stem(model: FrozenModel, shape: Sequence[int]) -> bytes:
    """The graph of what comes before the first BatchNorm layer, for any number of rows; as `export_balanced`."""
    _require_layers(SourceMoments.of(model))
    example, shapes = (torch.zeros(2, *shape),), ({0: Dim.DYNAMIC},)
    return export(BeforeNorms(model), example, shapes, (("x",), STEM), {MODEL: model.content_hash})


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
    _require_layers(source)
    network, inputs = BentNetwork(model, source), _example(model, source, source.prior.new_zeros(3, *shape))
    any_number, by_client = {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}
    shapes = ((*[any_number] * 5, any_number | by_client, by_client, by_client, *[any_number] * 3),)
    with torch.no_grad():
        layers = network.passed(*inputs).layers
    metadata = {MODEL: model.content_hash, LAYERS: json.dumps(layers)}
    return export(network, inputs, shapes, (INPUTS, OUTPUTS), metadata)


def _require_layers(source: SourceMoments) -> None:
    if not source.widths:
        raise GraphError("the model has no BatchNorm layer to bend: `balanced` runs it as it is")


def _example(model: FrozenModel, source: SourceMoments, x: Tensor) -> tuple[Tensor, ...]:
    """Inputs of two clients; no tensor twice, since the exporter would take both for one input."""
    rows = Rows.of([x[:1], x[1:]], source.prior)
    moments = (source.overall.unsqueeze(1).repeat(1, 2, 1) for _ in range(2))
    with torch.no_grad():
        stem = (each.clone() for each in BeforeNorms(model)(x))
    return *stem, *rows, *moments, *(source.prior.new_ones(2) for _ in range(3))


class OnnxPasses:
    """Runs the graphs of `export_stem` and `export_balanced`; to be given to `Balanced.step_many`.

    Other arguments as of `OnnxSession`.
    """

    def __init__(self, stem: bytes, graph: bytes, model: FrozenModel, threads: int | None = None) -> None:
        self._stem = OnnxSession(stem, model, threads)
        self._session = OnnxSession(graph, model, threads, awake=True)
        self._layers = tuple(json.loads(self._session.metadata[LAYERS]))

    def __call__(self, rows: Rows) -> Run:
        """As `Passes`."""
        return partial(self._run, StemOutput(*self._stem.run(STEM, {"x": rows.x})), rows)

    def _run(self, stem: StemOutput, rows: Rows, terms: Terms) -> Passed:
        noise = torch.zeros_like(terms.most) if terms.noise is None else terms.noise
        outputs = self._session.run(OUTPUTS, dict(zip(INPUTS, (*stem, *rows, *terms[:-1], noise), strict=True)))
        return Passed._make((*(each.to(rows.x.device) for each in outputs), self._layers))
