"""torchvision, imported when it is needed: it takes as long as torch itself, and is often installed apart from it."""

import re
from importlib import import_module, metadata
from typing import Any

import torch

from acclimate_store.errors import ArchitectureError


def torchvision(part: str) -> Any:
    """A module of torchvision, such as "models".

    Raises:
        ArchitectureError: torchvision was made for another torch than the one that is installed.
    """
    try:
        return import_module(f"torchvision.{part}")
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # by which of its parts does not fit
        wanted = [each for each in metadata.requires("torchvision") or () if re.match(r"torch\b", each)]
        raise ArchitectureError(
            f"torchvision {metadata.version('torchvision')} wants {', '.join(wanted) or 'another torch'} and finds "
            f"{torch.__version__} ({str(error).strip().splitlines()[0]}); install both in one go and from one place, "
            "as `pip install --force-reinstall torch torchvision` does"
        ) from error
