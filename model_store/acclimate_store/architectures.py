"""From the architecture name of a manifest to a network with random weights."""

import importlib
from collections.abc import Callable, Collection, Mapping

from pydantic import JsonValue
from torch import nn
from torchvision import models

from acclimate_store.errors import ArchitectureError
from acclimate_store.shallow_cnn import ShallowCNN

OWN: Mapping[str, Callable[..., nn.Module]] = {"shallow_cnn": ShallowCNN}


def build(architecture: str, options: Mapping[str, JsonValue], allowed_imports: Collection[str] = ()) -> nn.Module:
    """Build the network of a manifest.

    Args:
        architecture: `acclimate:<name>`, `torchvision:<classification model>`, or an import path `module:callable`.
        options: keyword arguments of its constructor.
        allowed_imports: the import paths that the operator trusts, word for word. A bundle is data from elsewhere
            and must not choose which code runs.

    Raises:
        ArchitectureError: unknown, not allowed, or the constructor refuses the options.
    """
    constructor = _constructor(architecture, allowed_imports)
    try:
        net = constructor(**options)
    except Exception as error:  # foreign code may raise anything
        raise ArchitectureError(
            f"{architecture} refuses architecture_options {dict(options)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(net, nn.Module):
        raise ArchitectureError(f"{architecture} must return a torch.nn.Module, not {type(net).__name__}")
    return net


def _constructor(architecture: str, allowed_imports: Collection[str]) -> Callable[..., object]:
    family, _, name = architecture.partition(":")
    if family == "acclimate":
        return _own(name)
    if family == "torchvision":
        return _torchvision(name)
    if architecture not in allowed_imports:
        allowed = ", ".join(sorted(allowed_imports)) or "none"
        raise ArchitectureError(
            f"{architecture} is neither acclimate:<name> nor torchvision:<name>, and the operator does not allow it "
            f"as an import path; allowed: {allowed}"
        )
    return _imported(family, name)


def _own(name: str) -> Callable[..., nn.Module]:
    if name not in OWN:
        raise ArchitectureError(f"acclimate:{name} is unknown; there is {', '.join(OWN)}")
    return OWN[name]


def _torchvision(name: str) -> Callable[..., nn.Module]:
    # Restricted to this module, the list holds neither detection, segmentation, video nor quantised models.
    if name not in models.list_models(module=models):
        raise ArchitectureError(f"torchvision:{name} is not a classification model of torchvision.models")
    return lambda **options: models.get_model(name, weights=None, **options)


def _imported(module: str, name: str) -> Callable[..., object]:
    try:
        constructor = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArchitectureError(f"cannot import {module}:{name}: {error}") from error
    if not callable(constructor):
        raise ArchitectureError(f"{module}:{name} is not callable")
    return constructor  # type: ignore[no-any-return]
