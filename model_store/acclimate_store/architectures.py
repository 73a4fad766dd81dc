"""From the architecture name of a manifest to a network with random weights."""

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import JsonValue
from torch import Tensor, nn

from acclimate_store.errors import ArchitectureError
from acclimate_store.shallow_cnn import ShallowCNN
from acclimate_store.vision import torchvision

OWN: Final[Mapping[str, Callable[..., nn.Module]]] = {"shallow_cnn": ShallowCNN}
FAMILIES: Final = ("acclimate", "torchvision", "timm", "transformers")
"""What comes before the colon of a registered architecture. Anything else is an import path `module:callable`."""


class LogitsOf(nn.Module):
    """A network of transformers, which answers with a record of several fields, as one that answers with its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        logits: Tensor = self.network(pixel_values=x).logits
        return logits


def build(architecture: str, options: Mapping[str, JsonValue], allowed_imports: Collection[str] = ()) -> nn.Module:
    """Build the network of a manifest.

    Args:
        architecture: `acclimate:<name>`, `torchvision:<classification model>`, `timm:<model>`,
            `transformers:<model type>`, or an import path `module:callable`, which is looked for in the working
            directory too.
        options: keyword arguments of its constructor; `config` for transformers, the content of a `config.json`.
        allowed_imports: the import paths that the operator trusts, word for word. A bundle is data from elsewhere
            and must not choose which code runs.

    Raises:
        ArchitectureError: unknown, not allowed, not installed, or the constructor refuses the options.
    """
    constructor = constructor_of(architecture, allowed_imports)
    try:
        net = constructor(**options)
    except Exception as error:  # foreign code may raise anything
        raise ArchitectureError(
            f"{architecture} refuses architecture_options {dict(options)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(net, nn.Module):
        raise ArchitectureError(f"{architecture} must return a torch.nn.Module, not {type(net).__name__}")
    return net


def require_extra(package: str) -> None:
    """Refuse to go on without a package that is in an extra of the same name.

    Raises:
        ArchitectureError: it is not installed.
    """
    if find_spec(package) is None:
        raise ArchitectureError(f'{package} is not installed; pip install "acclimate[{package}]"')


def constructor_of(architecture: str, allowed_imports: Collection[str]) -> Callable[..., object]:
    """What `build` calls; raises ArchitectureError as it does."""
    family, _, name = architecture.partition(":")
    match family:
        case "acclimate":
            return _own(name)
        case "torchvision":
            return _torchvision(name)
        case "timm":
            return _timm(name)
        case "transformers":
            return _transformers(name)
    if architecture not in allowed_imports:
        allowed = ", ".join(sorted(allowed_imports)) or "none"
        raise ArchitectureError(
            f"{architecture} is none of {', '.join(f'{each}:<name>' for each in FAMILIES)} but other code, which "
            f"runs only if you trust it and say so: --allow-import {architecture}, or to serve it "
            f"ACCLIMATE_ALLOWED_IMPORTS='[\"{architecture}\"]'; trusted so far: {allowed}"
        )
    return _imported(family, name)


def _own(name: str) -> Callable[..., nn.Module]:
    if name not in OWN:
        raise ArchitectureError(f"acclimate:{name} is unknown; there is {', '.join(OWN)}")
    return OWN[name]


def _torchvision(name: str) -> Callable[..., nn.Module]:
    models = torchvision("models")
    # Restricted to this module, the list holds neither detection, segmentation, video nor quantised models.
    if name not in models.list_models(module=models):
        raise ArchitectureError(f"torchvision:{name} is not a classification model of torchvision.models")
    return lambda **options: models.get_model(name, weights=None, **options)


def _timm(name: str) -> Callable[..., nn.Module]:
    require_extra("timm")
    torchvision("models")  # timm needs it, and what does not fit is said there
    import timm

    if not timm.is_model(name):
        raise ArchitectureError(f"timm:{name} is unknown to timm {timm.__version__}; timm.list_models() lists what is")
    return lambda **options: timm.create_model(name, pretrained=False, **options)


def _transformers(name: str) -> Callable[..., nn.Module]:
    require_extra("transformers")
    from transformers import AutoConfig, AutoModelForImageClassification

    def construct(config: Mapping[str, Any]) -> nn.Module:
        settings = AutoConfig.for_model(name, **{key: value for key, value in config.items() if key != "model_type"})
        net: nn.Module = AutoModelForImageClassification.from_config(settings)  # type: ignore[no-untyped-call]
        return LogitsOf(net)

    return construct


def _imported(module: str, name: str) -> Callable[..., object]:
    try:
        with _working_directory_on_path():
            constructor = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArchitectureError(f"cannot import {module}:{name}: {error}") from error
    if not callable(constructor):
        raise ArchitectureError(f"{module}:{name} is not callable")
    return constructor  # type: ignore[no-any-return]


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Last, so that no file there takes the place of an installed module."""
    directory = str(Path.cwd())
    sys.path.append(directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
