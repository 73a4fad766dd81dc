"""Model bundles: frozen networks with everything that was learned or measured before deployment."""

from acclimate_store.bundle import Bundle, load_bundle, write_bundle
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import (
    ArchitectureError,
    BundleError,
    BundleExists,
    BundleNotFound,
    GraphError,
    IntegrityError,
    ManifestError,
    MeasureError,
    SampleError,
    TensorError,
)
from acclimate_store.manifest import InputSpec, Manifest, Resize
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
