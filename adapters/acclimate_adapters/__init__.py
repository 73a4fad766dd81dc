"""Inference-time adaptation of a frozen classifier: pure PyTorch, no I/O, no clock, no global random numbers."""

from acclimate_adapters.adapter import Adapter, Enrolling, Signal, Step, enrols, missing, require
from acclimate_adapters.errors import (
    AcclimateError,
    ConfigurationError,
    InputError,
    MissingSource,
    NumericalError,
    StateCorrupt,
    StateError,
    StateMismatch,
    UnknownAdapter,
)
from acclimate_adapters.guard import guarded_step
from acclimate_adapters.labels import Labelled, Learning, learns
from acclimate_adapters.network.direction import Direction, direction
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.registry import ADAPTERS, create, schema
from acclimate_adapters.source import Anchors, Source
from acclimate_adapters.state import State

__all__ = [
    "ADAPTERS",
    "AcclimateError",
    "Adapter",
    "Anchors",
    "ConfigurationError",
    "Direction",
    "Enrolling",
    "FrozenModel",
    "InputError",
    "Labelled",
    "Learning",
    "MissingSource",
    "NumericalError",
    "Pass",
    "Signal",
    "Source",
    "State",
    "StateCorrupt",
    "StateError",
    "StateMismatch",
    "Step",
    "UnknownAdapter",
    "create",
    "direction",
    "enrols",
    "guarded_step",
    "learns",
    "missing",
    "require",
    "schema",
]
