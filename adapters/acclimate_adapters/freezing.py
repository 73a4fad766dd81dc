"""What happens once to a network that is to be frozen."""

import hashlib

import torch
from torch import nn

from acclimate_adapters.source import Source


def ordinary(net: nn.Module) -> nn.Module:
    """The network, which nobody else holds, with tensors that autograd accepts even if they were inference tensors."""
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_inference():
                module.register_parameter(name, nn.Parameter(parameter.clone()))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_inference():
                module.register_buffer(name, buffer.clone())
    return net


def content_hash(net: nn.Module, classifier: str, source: Source) -> str:
    """16 hex digits over weights, running statistics, classifier name and source."""
    digest = hashlib.sha256(classifier.encode())
    tensors = {f"net.{name}": t for name, t in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    tensors |= {f"source.{name}": t for name, t in source.tensors().items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"|{name}|{tensor.dtype}|{[*tensor.shape]}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for name, rate in sorted((source.rates or {}).items()):
        digest.update(f"|{name}|{float(rate).hex()}|".encode())
    return digest.hexdigest()[:16]
