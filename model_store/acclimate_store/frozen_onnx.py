"""The frozen pass on ONNX Runtime: a graph from images to features and logits.

Needs onnxruntime, and onnxscript to export.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim

from acclimate_adapters import FrozenModel, Pass
from acclimate_store.onnx_export import export
from acclimate_store.onnx_sessions import MODEL, OnnxSession

INPUT, OUTPUTS = "images", ("features", "logits")


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
    return export(FrozenNetwork(model), example, shapes, ((INPUT,), OUTPUTS), {MODEL: model.content_hash})


class OnnxFrozen:
    """Runs a graph of `export_frozen`; to be given to `FrozenModel.with_runtime`. Arguments as of `OnnxSession`."""

    def __init__(self, graph: bytes, model: FrozenModel, threads: int | None = None) -> None:
        self._session = OnnxSession(graph, model, threads)

    def __call__(self, x: Tensor) -> Pass:
        """Features and logits of a batch that `FrozenModel.batch` has checked."""
        return Pass(*(each.to(x.device) for each in self._session.run(OUTPUTS, {INPUT: x})))
