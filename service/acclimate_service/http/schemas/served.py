"""Documents about what is served: models and their versions, adapters, replicas, and whether they answer."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from acclimate_service.http.schemas.common import Absent, Count, Document, ModelName, Probability


class Availability(Document):
    """Whether a model has everything for an adapter."""

    available: bool
    missing: list[str]


class Adapter(Availability):
    """One adapter or chain."""

    name: str
    description: str
    enrols: Annotated[bool, Field(description="Whether it takes labelled images.")]
    hyperparameters: Annotated[dict[str, Any], Field(description="JSON Schema of them.")]


class Configuration(Document):
    """An adapter and its hyper-parameters, where they differ from the defaults."""

    adapter: str
    hyperparameters: dict[str, Any]


class Adapters(Document):
    """Every adapter of the default model."""

    model: ModelName
    default: Configuration
    adapters: list[Adapter]


class ImageSize(Document):
    """Size of the images that a model takes."""

    channels: Count
    height: Count
    width: Count


class DefaultAdapter(Document):
    """What new clients begin with, and because of what."""

    name: str
    because: str
    reason: str


class OtherStates(Document):
    """Clients that had states of other models when the replica started."""

    clients: dict[str, Count]
    complete: Annotated[bool, Field(description="Whether all were looked at.")]


class Model(Document):
    """A model that is served."""

    name: str
    version: str
    architecture: str
    runtime: str
    layout: str
    classes: list[str]
    input: ImageSize
    adapters: dict[str, Availability]
    default_adapter: DefaultAdapter
    default: bool
    states_of_other_models: Absent[OtherStates] = None


class Models(Document):
    """The models served, the default one first."""

    models: list[Model]


class StoreVersion(Document):
    """A version of a model that the store holds."""

    version: str
    served: bool


class ModelManifest(Document):
    """What a model is."""

    model: ModelName
    manifest: Annotated[dict[str, Any], Field(description="As `manifest.json` of its bundle.")]
    rates: Annotated[
        dict[str, float] | None, Field(description="Adaptation rate of each module; null if none were learned.")
    ]
    versions: Annotated[list[StoreVersion], Field(description="Of this model, from the oldest to the newest.")]


class Stage(Document):
    """How long a stage of requests took within about a minute."""

    number: Annotated[float, Field(ge=0)]
    p50_s: Annotated[float | None, Field(description="At most so long half of them; null beyond the bounds.")] = None
    p95_s: float | None = None


class Replica(Document):
    """What a replica said of itself."""

    id: Annotated[str, Field(description="Different after each start.")]
    name: str
    age_s: Annotated[float, Field(ge=0, description="Seconds since it said so.")]
    version: str
    started_at: datetime
    device: str
    models: Annotated[list[str], Field(description="`name/version` of those it serves.")]
    ready: bool
    reason: str | None
    failing: Annotated[list[str], Field(description="Work in the background whose last run failed.")]
    waiting: Annotated[Count, Field(description="Batches under way.")]
    clients_in_memory: Count
    state_bytes: Count
    leases: Annotated[Count, Field(description="Clients whose journals it writes.")]
    journal_entries: Count
    journal_bytes: Count
    stages: dict[str, Stage]


class Redis(Document):
    """What Redis says of itself; of a cluster, the worst that any of its masters says."""

    version: str
    role: str
    aof_enabled: bool
    aof_healthy: bool
    maxmemory_policy: str
    replicas: Count
    cluster: bool
    durability: str
    masters: Count
    used_bytes: Count
    max_bytes: Annotated[Count, Field(description="0 for no bound.")]


class Replicas(Document):
    """The replicas of a deployment and their Redis."""

    answered_by: Annotated[str, Field(description="`id` of the replica that was asked.")]
    replicas: list[Replica]
    redis: Redis


class Canary(Document):
    """A version that answers a share of the clients."""

    version: str
    share: Probability


class ShadowVersion(Document):
    """A version that is shown a share of the batches, and answers nobody."""

    version: str
    share: Probability


class RolloutWanted(Document):
    """Which versions are to answer clients: a canary its share of them, the default all others."""

    default: str
    canary: Canary | None = None
    shadow: ShadowVersion | None = None


class RolledVersion(Document):
    """A version that is to be loaded, the share of the clients that it answers, and how many are in memory here."""

    version: str
    share: Probability
    clients_in_memory: Count


class ReplicaVersions(Document):
    """What a replica has of a model: versions, why it lacks others, and the change that it has followed to."""

    replica: str
    loaded: list[str]
    failed: dict[str, str]
    number: int


class Rollout(Document):
    """Which versions of a model answer clients; `done` once all replicas that were heard of lately have followed."""

    model: str
    number: Annotated[Count, Field(description="Of changes so far.")]
    default: str
    canary: Canary | None
    shadow: ShadowVersion | None
    previous: Annotated[str | None, Field(description="The default before.")]
    versions: list[RolledVersion]
    replicas: list[ReplicaVersions]
    done: bool


class Live(Document):
    """The process answers."""

    live: Literal[True]


class FailingTask(Document):
    """Work beside the batches that fails."""

    task: str
    seconds: float
    error: str


class Ready(Document):
    """Whether batches are answered."""

    ready: bool
    live: Literal[True]
    reason: str | None
    failing: list[FailingTask]
