"""What happens once to a network that is to be frozen."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from acclimate_adapters.errors import ConfigurationError
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


def content_hash(state_dict: Mapping[str, Tensor], classifier: str | None, source: Source) -> str:
    """16 hex digits over weights, running statistics, classifier name and source."""
    digest = hashlib.sha256((classifier or "").encode())
    tensors = {f"net.{name}": t for name, t in state_dict.items() if not name.endswith("num_batches_tracked")}
    tensors |= {f"source.{name}": t for name, t in source.tensors().items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"|{name}|{tensor.dtype}|{[*tensor.shape]}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for name, rate in sorted((source.rates or {}).items()):
        digest.update(f"|{name}|{float(rate).hex()}|".encode())
    return digest.hexdigest()[:16]


def check_source(tensors: Mapping[str, Tensor], source: Source, *, classes: int, feature_size: int) -> None:
    """Check a network's tensors, and that its source speaks of them, of its classes and of its features.

    Raises:
        ConfigurationError: it does not, or a tensor is not finite.
    """
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise ConfigurationError(f"the network's {name} holds non-finite numbers")
    if len(source.prior) != classes:
        raise ConfigurationError(f"source.prior has {len(source.prior)} classes, the network {classes}")
    for name in ("prototypes", "descriptor"):
        found = getattr(source, name)
        if found is not None and found.shape[-1] != feature_size:
            raise ConfigurationError(f"source.{name} has {found.shape[-1]} features, the network {feature_size}")
    unknown = sorted((source.rates or {}).keys() - tensors.keys())
    if unknown:
        raise ConfigurationError(
            f"there are adaptation rates for {', '.join(unknown)}, which the network has not; it can adapt "
            + ", ".join(tensors)
        )
