"""What is served, as frozen records: models, and the adapters that they can be served with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_client.evidence import AdapterEvidence


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Name and version of a published model."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class InputInfo:
    """Size of the images a model takes, in pixels."""

    channels: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Whether a model can be served with an adapter, and if not, what its bundle lacks."""

    available: bool
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model the server offers.

    Attributes:
        classes: Class names, in the order of the class indices. [K]
        adapters: Adapters by name.
        default: Whether requests that name no model are served by this one.
    """

    name: str
    version: str
    architecture: str
    classes: tuple[str, ...]
    input: InputInfo
    adapters: Mapping[str, AdapterInfo]
    default: bool


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """One adapter or chain that clients may be configured with.

    Attributes:
        description: One line.
        enrols: Whether it takes labelled images of the client.
        available: Whether the model has everything for it.
        missing: What it lacks.
        hyperparameters: JSON schema (draft 2020-12).
    """

    name: str
    description: str
    enrols: bool
    available: bool
    missing: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """What labels say of the adapters of one model, over all clients.

    Attributes:
        policy: What answers clients without a verdict of their own: adapt, frozen or follow-fleet.
    """

    model: ModelRef
    policy: str
    adapters: tuple[AdapterEvidence, ...]
