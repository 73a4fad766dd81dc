"""Model bundles: frozen networks with everything that was learned or measured before deployment.

Names are imported when they are used, so that a command that only prints its help does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate_store.bundle import Bundle, load_bundle, write_bundle
    from acclimate_store.catalogue import BundleKey, Catalogue
    from acclimate_store.errors import (
        ArchitectureError,
        BundleError,
        BundleExists,
        BundleNotFound,
        GoldenError,
        GraphError,
        IntegrityError,
        ManifestError,
        MeasureError,
        SampleError,
        TensorError,
    )
    from acclimate_store.manifest import Evidence, InputSpec, Manifest, Resize
    from acclimate_store.samples import ClientStream, load_streams

__all__ = [
    "ArchitectureError",
    "Bundle",
    "BundleError",
    "BundleExists",
    "BundleKey",
    "BundleNotFound",
    "Catalogue",
    "ClientStream",
    "Evidence",
    "GoldenError",
    "GraphError",
    "InputSpec",
    "IntegrityError",
    "Manifest",
    "ManifestError",
    "MeasureError",
    "Resize",
    "SampleError",
    "TensorError",
    "load_bundle",
    "load_streams",
    "write_bundle",
]

_MODULES = {
    **dict.fromkeys(("Bundle", "load_bundle", "write_bundle"), "bundle"),
    **dict.fromkeys(("BundleKey", "Catalogue"), "catalogue"),
    **dict.fromkeys(("Evidence", "InputSpec", "Manifest", "Resize"), "manifest"),
    **dict.fromkeys(("ClientStream", "load_streams"), "samples"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"acclimate_store.{_MODULES.get(name, 'errors')}"), name)
