"""Graphs of a model's passes for ONNX Runtime: how they are exported, and how they are run.

`frozen.onnx` is the frozen pass. `balanced.onnx` is one pass of `balanced`: it takes the statistics of clients beside
their images and gives their moments. `bn_adapt.onnx` is the pass of BN-Adapt, which `consensus` takes beside both of
these. What comes before the first BatchNorm layer is a graph of its own, `balanced_stem.onnx`, since all passes over a
batch share it. They are exported from the very passes that torch runs, so each method exists once.

Running them needs onnxruntime; exporting them needs onnx and onnxscript as well.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import onnxruntime  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.export import Dim

from acclimate_adapters import FrozenModel, Pass, create, missing
from acclimate_adapters.balanced.moments import SourceMoments, layer_widths
from acclimate_adapters.balanced.passes import (
    Blending,
    Passed,
    Rows,
    Run,
    StemOutput,
    Terms,
    TorchRun,
    bent_pass,
    blended_pass,
)
from acclimate_adapters.network.probes import Norm
from acclimate_store.errors import GraphError
from acclimate_store.files import BALANCED_GRAPH, BLENDED_GRAPH, FROZEN_GRAPH, STEM_GRAPH

_FROZEN: Final = ("features", "logits")
"""Outputs of the frozen pass."""
MODEL: Final = "acclimate.model"
"""Metadata of a graph: content hash of the model it was exported from."""
_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution provider by the type of a torch device."""
_STEM = tuple(f"stem_{field}" for field in StemOutput._fields)
_BATCH = (*_STEM, *Rows._fields)
_INPUTS = (*_BATCH, *Terms._fields)
_BLENDED_INPUTS = (*_BATCH, *Blending._fields)
_OUTPUTS = Passed._fields[:-1]  # all but the names of the layers
_ANY_NUMBER, _BY_CLIENT = {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}
_ROW_SHAPES = (*[_ANY_NUMBER] * 5, _ANY_NUMBER | _BY_CLIENT)  # of `_BATCH`
_LAYERS = "acclimate.layers"  # metadata: names of the layers in their order


def export_graphs(model: FrozenModel, shape: Sequence[int], progress: Callable[[str], None]) -> dict[str, bytes]:
    """The graphs that a model can have, by file name.

    Args:
        model: in single precision, on the CPU.
        shape: C, H and W of its input.
        progress: told what is being done.

    Raises:
        GraphError: a graph cannot be exported.
    """
    exports = {FROZEN_GRAPH: export_frozen}
    if layer_widths(model) and not missing(create("balanced"), model):
        exports |= {STEM_GRAPH: export_stem, BALANCED_GRAPH: export_balanced, BLENDED_GRAPH: export_blended}
    graphs = {}
    for file, export in exports.items():
        progress(f"exporting {file}")
        try:
            graphs[file] = export(model, shape)
        except Exception as error:  # the exporter raises anything
            raise GraphError(f"{file} cannot be exported: {error}") from error
    return graphs


class FrozenNetwork(nn.Module):
    """The frozen pass as a module: x [B, C, H, W], normalised, to features [B, d] and logits [B, K]."""

    def __init__(self, model: FrozenModel) -> None:
        super().__init__()
        self._model = model
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The pass."""
        answer = self._model.run(x)
        return answer.features, answer.logits


def export_frozen(model: FrozenModel, shape: Sequence[int]) -> bytes:
    """The graph of the frozen pass, for any number of rows.

    Args:
        model: in single precision, on the CPU.
        shape: C, H and W of its input.
    """
    shapes = ({0: Dim.DYNAMIC},)
    example = (torch.zeros(3, *shape),)
    metadata = {MODEL: model.content_hash}
    return _export(FrozenNetwork(model), example, shapes, inputs=("images",), outputs=_FROZEN, metadata=metadata)


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

    Of the images it needs only what the network uses again after its first BatchNorm layer.
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


class BlendedNetwork(nn.Module):
    """The pass of BN-Adapt as a function of tensors: fields of `StemOutput`, `Rows` and `Blending` to logits."""

    def __init__(self, model: FrozenModel) -> None:
        super().__init__()
        self._model = model
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """The pass."""
        stem, rows, blending = StemOutput(*inputs[:3]), Rows(*inputs[3:6]), Blending(*inputs[6:])
        return blended_pass(self._model, rows, blending, lambda _: stem)


def export_stem(model: FrozenModel, shape: Sequence[int]) -> bytes:
    """The graph of what comes before the first BatchNorm layer, for any number of rows; as `export_balanced`."""
    _require_layers(SourceMoments.of(model))
    example, shapes = (torch.zeros(2, *shape),), ({0: Dim.DYNAMIC},)
    return _export(
        BeforeNorms(model), example, shapes, inputs=("x",), outputs=_STEM, metadata={MODEL: model.content_hash}
    )


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
    moments = (source.overall.unsqueeze(1).repeat(1, 2, 1) for _ in range(2))
    network, inputs = BentNetwork(model, source), (*_example_rows(model, source, shape), *moments, *_numbers(source, 3))
    shapes = ((*_ROW_SHAPES, _BY_CLIENT, _BY_CLIENT, *[_ANY_NUMBER] * 3),)
    with torch.no_grad():
        layers = network.passed(*inputs).layers
    metadata = {MODEL: model.content_hash, _LAYERS: json.dumps(layers)}
    return _export(network, inputs, shapes, inputs=_INPUTS, outputs=_OUTPUTS, metadata=metadata)


def export_blended(model: FrozenModel, shape: Sequence[int]) -> bytes:
    """The graph of the pass of BN-Adapt, for any number of rows and clients; as `export_balanced`."""
    source = SourceMoments.of(model)
    _require_layers(source)
    inputs = (*_example_rows(model, source, shape), *_numbers(source, 2))
    shapes = ((*_ROW_SHAPES, *[_ANY_NUMBER] * 2),)
    metadata = {MODEL: model.content_hash}
    return _export(
        BlendedNetwork(model), inputs, shapes, inputs=_BLENDED_INPUTS, outputs=("logits",), metadata=metadata
    )


def _require_layers(source: SourceMoments) -> None:
    if not source.widths:
        raise GraphError("the model has no BatchNorm layer to bend: `balanced` runs it as it is")


def _example_rows(model: FrozenModel, source: SourceMoments, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Rows of two clients, and what comes out of the stem for them."""
    x = source.prior.new_zeros(3, *shape)
    rows = Rows.of([x[:1], x[1:]], source.prior)
    with torch.no_grad():
        stem = [each.clone() for each in BeforeNorms(model)(x)]
    return *stem, *rows


def _numbers(source: SourceMoments, fields: int) -> list[Tensor]:
    """So many fields of a number for each of two clients; no tensor twice: the exporter would take it for one input."""
    return [source.prior.new_ones(2) for _ in range(fields)]


def _export(
    network: nn.Module,
    example: tuple[Tensor, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> bytes:
    """The graph of a network.

    Args:
        network: from tensors to tensors.
        example: what it may be given.
        dynamic_shapes: which axes of that may have any size, as `torch.onnx.export` takes them.
        inputs: their names.
        outputs: their names.
        metadata: to be found in the graph.
    """
    with torch.no_grad():
        program = torch.onnx.export(
            network,
            example,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None  # it is None without `dynamo`
    program.model.metadata_props.update(metadata)
    proto = program.model_proto
    for node in proto.graph.node:  # where in whose source code it comes from: a third of the bytes of a small graph
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    graph: bytes = proto.SerializeToString()
    return graph


class OnnxSession:
    """A graph that takes tensors of any device and gives them on the host.

    Once a run ends its threads sleep: awake they would take the cores from torch and make it twice as slow. Its memory
    is that of the process: an arena of its own would keep the most that any number of rows ever took.

    Args:
        graph: exported from the model.
        model: the model.
        threads: of one operation; as many as there are cores by default.
        awake: whether they wait for each other without sleeping within a run. That is faster for a graph of many small
            operations, and slower for others beside torch's threads, which stay awake after torch's own work.

    Attributes:
        metadata: of the graph.

    Raises:
        GraphError: the graph is that of another model, or ONNX Runtime cannot run it on this device.
    """

    def __init__(self, graph: bytes, model: FrozenModel, threads: int | None = None, *, awake: bool = False) -> None:
        provider = provider_for(model.device)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads or 0, 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(awake)))
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=[provider])
        except Exception as error:  # it has many kinds, which share no base
            raise GraphError(f"ONNX Runtime cannot load the graph: {error}") from error
        if self._session.get_providers()[0] != provider:
            raise GraphError(f"ONNX Runtime took {self._session.get_providers()[0]} instead of {provider}")
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        if self.metadata.get(MODEL) != model.content_hash:
            found = self.metadata.get(MODEL)
            raise GraphError(f"the graph is that of model {found}, not of {model.content_hash}; export it again")

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of these names; any number of rows, as they are."""
        feed: dict[str, Any] = {name: tensor.numpy(force=True) for name, tensor in inputs.items()}
        return [torch.from_numpy(each) for each in self._session.run(outputs, feed)]


class OnnxFrozen:
    """Runs a graph of `export_frozen`; to be given to `FrozenModel.with_runtime`. Arguments as of `OnnxSession`."""

    def __init__(self, graph: bytes, model: FrozenModel, threads: int | None = None) -> None:
        self._session = OnnxSession(graph, model, threads)

    def __call__(self, x: Tensor) -> Pass:
        """Features and logits of a batch that `FrozenModel.batch` has checked."""
        features, logits = self._session.run(_FROZEN, {"images": x})
        return Pass(features.to(x.device), logits.to(x.device))


class OnnxPasses:
    """Runs the graphs of `export_stem`, `export_balanced` and `export_blended`; to be given to `step_many`.

    Other arguments as of `OnnxSession`. Bundles of before have no graph of the blended pass: torch runs that one.
    """

    def __init__(
        self, stem: bytes, bent: bytes, blended: bytes | None, model: FrozenModel, threads: int | None = None
    ) -> None:
        self.model = model
        self.stem = OnnxSession(stem, model, threads)
        self.bent = OnnxSession(bent, model, threads, awake=True)
        self.blended = None if blended is None else OnnxSession(blended, model, threads, awake=True)
        self.layers = tuple(json.loads(self.bent.metadata[_LAYERS]))

    def __call__(self, rows: Rows) -> Run:
        """As `Passes`."""
        return OnnxRun(self, rows)


class OnnxRun:
    """Passes over some rows by the graphs of a model."""

    def __init__(self, graphs: OnnxPasses, rows: Rows) -> None:
        self._graphs, self._rows = graphs, rows
        self._batch = (*graphs.stem.run(_STEM, {"x": rows.x}), *rows)

    def __call__(self, terms: Terms) -> Passed:
        """As `Run`."""
        noise = torch.zeros_like(terms.most) if terms.noise is None else terms.noise
        inputs = dict(zip(_INPUTS, (*self._batch, *terms[:-1], noise), strict=True))
        tensors = [each.to(self._rows.x.device) for each in self._graphs.bent.run(_OUTPUTS, inputs)]
        return Passed._make([*tensors, self._graphs.layers])

    def blended(self, blending: Blending) -> Tensor:
        """As `Run.blended`."""
        if self._graphs.blended is None:
            return TorchRun(self._graphs.model, SourceMoments.of(self._graphs.model), self._rows).blended(blending)
        inputs = dict(zip(_BLENDED_INPUTS, (*self._batch, *blending), strict=True))
        (logits,) = self._graphs.blended.run(("logits",), inputs)
        return logits.to(self._rows.x.device)


def provider_for(device: torch.device) -> str:
    """The execution provider of a device.

    Raises:
        GraphError: this ONNX Runtime has none.
    """
    provider = _PROVIDERS.get(device.type)
    there: list[str] = onnxruntime.get_available_providers()
    if provider not in there:
        raise GraphError(f"ONNX Runtime {onnxruntime.__version__} cannot use {device.type}: it has {', '.join(there)}")
    return provider


def runtime_version() -> str:
    """ONNX Runtime and its version."""
    return f"onnxruntime {onnxruntime.__version__}"
