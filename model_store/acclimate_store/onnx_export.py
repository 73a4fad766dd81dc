"""From a network to the bytes of an ONNX graph. Needs onnxscript."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def export(
    network: nn.Module,
    example: tuple[Tensor, ...],
    dynamic_shapes: tuple[Any, ...],
    names: tuple[Sequence[str], Sequence[str]],
    metadata: Mapping[str, str],
) -> bytes:
    """The graph of a network.

    Args:
        network: from tensors to tensors.
        example: what it may be given.
        dynamic_shapes: which axes of that may have any size, as `torch.onnx.export` takes them.
        names: of inputs and outputs.
        metadata: to be found in the graph.
    """
    inputs, outputs = names
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
