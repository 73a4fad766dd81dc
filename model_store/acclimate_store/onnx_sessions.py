"""ONNX Runtime as it is run here: on the device of the model, beside torch, and only with graphs of that very model."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnxruntime  # type: ignore[import-untyped]
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel
from acclimate_store.errors import GraphError

MODEL: Final = "acclimate.model"
"""Metadata of a graph: content hash of the model it was exported from."""
_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Execution provider by the type of a torch device."""


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
            raise GraphError(f"the graph is that of model {found}, not of {model.content_hash}; export it anew")

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of these names; any number of rows, as they are."""
        feed: dict[str, Any] = {name: tensor.numpy(force=True) for name, tensor in inputs.items()}
        return [torch.from_numpy(each) for each in self._session.run(outputs, feed)]


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


def version() -> str:
    """Of ONNX Runtime."""
    return f"onnxruntime {onnxruntime.__version__}"
