"""The documents of the interface as types: what `/openapi.json` describes, and what tests hold replies against.

Nothing is read or written through them while requests are served. A member that a reply may lack has a default, which
says what its absence means.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, SkipJsonSchema, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema
from typing_extensions import TypeAliasType

Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
_Unknown: TypeAlias = Annotated[Literal["unknown"], WithJsonSchema({"type": "string", "enum": ["unknown"]})]
Committed = TypeAliasType("Committed", bool | _Unknown)
"""As an enumeration: openapi-python-client takes every truth value for a constant beside it, and refuses it."""
Adaptation: TypeAlias = Literal["running", "paused"]
T = TypeVar("T")
Absent: TypeAlias = T | SkipJsonSchema[None]
"""Of a member that may be left out, and is never null."""
Durability: TypeAlias = Literal["always", "everysec", "none", "unknown"]
AdapterName: TypeAlias = Annotated[
    str, Field(max_length=64, json_schema_extra={"pattern": r"^[a-z0-9_]+(\+[a-z0-9_]+)*$", "example": "atp"})
]
Verdict: TypeAlias = Literal["trusted", "undecided", "harmful"]


class Document(BaseModel):
    """A JSON object without further members."""

    model_config = ConfigDict(extra="forbid")


# problems


class Problem(Document):
    """Why a request was not answered (RFC 9457)."""

    type: Literal["about:blank"]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: Annotated[str, Field(description="What was wrong and what is accepted, for people.")]
    code: Annotated[str, Field(description="Stable, for programs. There may be more of them in later versions.")]
    retryable: Annotated[bool, Field(description="Whether the same request may succeed later.")]
    state_committed: Annotated[Committed, Field(description="Whether the client's state changed all the same.")]
    request_id: str
    error: Annotated[str, Field(description="Repeats `detail`.")]


# what replies have in common


class ModelName(Document):
    """Name and version of a model."""

    name: str
    version: str


class State(Document):
    """What became of the client's state."""

    version: Annotated[int, Field(ge=0, description="Changes applied to the client's state so far.")]
    status: Literal["cold", "warm", "restored", "reset", "rolled_back", "guarded", "frozen"]
    committed: Annotated[Committed, Field(description="Whether this request changed the state.")]
    replayed: Literal["none", "stored", "recomputed", "unavailable"]
    durability: Durability
    lost: Annotated[int, Field(ge=0, description="Acknowledged versions that Redis lost.")] = 0
    skipped: Annotated[bool, Field(description="Whether images of the batch tell nothing.")] = False
    adaptation: Adaptation = "running"


class PredictedClass(Document):
    """The predicted class of one image."""

    index: Count
    label: str
    probability: Probability


class GuardDecision(Document):
    """Which model answered, where that is not the adapted one, or was another one before."""

    answering: Literal["adapted", "frozen"]
    because: str
    switched: bool


Signals: TypeAlias = dict[str, float | list[float]]


class Reply(Document):
    """What all replies to requests of a client have."""

    client_id: str
    model: ModelName
    adapter: str
    state: State
    request_id: Annotated[str, Field(description="Of the request; of a repeated one, that of the first.")]
    key_expires_at_earliest: Annotated[
        Absent[datetime], Field(description="Until then at least the Idempotency-Key is remembered.")
    ] = None


class Prediction(Reply):
    """The answer to a batch; without predictions where `state.replayed` is `unavailable`."""

    predictions: list[PredictedClass]
    signals: Annotated[Signals, Field(description="Label-free measurements of the adapter.")]
    probabilities: Annotated[
        Absent[list[list[Probability]]], Field(description="The posterior of every image, if it was asked for.")
    ] = None
    guard: Absent[GuardDecision] = None
    ask: Annotated[Absent[list[Count]], Field(description="Rows that are worth a label, in order of worth.")] = None


class Change(Reply):
    """A client that was reset, or given a state; what its other replies have, is gone of an answer too old."""

    predictions: Annotated[list[PredictedClass], Field(max_length=0)] = []
    signals: Annotated[Signals, Field(max_length=0)] = {}


class Enrolment(Change):
    """A client that restarted from labelled images."""

    enrolled: Annotated[Absent[int], Field(description="How many.")] = None


class Rollback(Change):
    """A client that went back to an earlier state."""

    restored: Annotated[Absent[int], Field(description="The version of that state.")] = None


class Configured(Change):
    """A client and the adapter that it has now."""

    hyperparameters: Absent[dict[str, Any]] = None
    adaptation: Absent[Adaptation] = None
    changed: Absent[bool] = None


# labels


class Interval(Document):
    """An accuracy over all rows between bounds; null where no label is known, or nobody told one unasked."""

    accuracy: Probability | None
    low: Probability | None
    high: Probability | None


class Evidence(Document):
    """What labels show."""

    verdict: Verdict
    labelled: Count
    asked: Annotated[int, Field(ge=0, description="Rows among those whose labels were asked for.")]
    wins: Annotated[int, Field(ge=0, description="Rows that only the adapted prediction has right.")]
    losses: Annotated[int, Field(ge=0, description="Rows that only the frozen prediction has right.")]
    frozen: Interval
    adapted: Interval


class Guard(Evidence):
    """What a client's labels show, and which model answers it."""

    answering: Literal["adapted", "frozen"]
    because: str


class ToldRows(Document):
    """What became of labelled rows."""

    counted: Count
    duplicate: Count
    contradicting: Count
    unknown: Count


class Feedback(Change):
    """What labels changed."""

    feedback: Absent[ToldRows] = None
    guard: Absent[Guard] = None


class OpenQuestion(Document):
    """Rows of one answer whose labels are asked for, and not told yet."""

    request_id: Annotated[str, Field(description="Of the answer.")]
    rows: Annotated[list[Count], Field(min_length=1, description="Places in the batch, in order of worth.")]


class ClientQuestion(OpenQuestion):
    """A question, and how long it stays open."""

    expires_in_rows: Annotated[int, Field(ge=0, description="Further rows of the client that leave it open.")]


class ClientAsks(Document):
    """The open questions of a client, the newest first."""

    client_id: str
    model: ModelName
    asks: list[ClientQuestion]
    expires_in_s: Annotated[int, Field(ge=0, description="Until they expire, if the client sends nothing more.")]


class AskedClient(Document):
    """What one of many clients is asked, the newest questions first."""

    client_id: str
    asks: list[OpenQuestion]
    expires_in_s: Annotated[int, Field(ge=0, description="Until they expire, if the client sends nothing more.")]


class Asks(Document):
    """Clients that are asked something, those first whose questions changed last."""

    model: ModelName
    clients: list[AskedClient]
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class LastImage(Document):
    """One image that a client sent."""

    request_id: str
    row: Count
    predicted: Annotated[str, Field(description="Class that was answered.")]
    asked: Annotated[bool, Field(description="Whether its label is asked for.")]
    label: Annotated[str | None, Field(description="Its label, if one was told.")]
    png: Annotated[str | None, Field(description="PNG, base64; null where there are neither 1 nor 3 channels.")]


class LastImages(Document):
    """The last images of a client that a replica has, the newest first."""

    client_id: str
    model: ModelName
    images: list[LastImage]


class AdapterEvidence(Document):
    """What the labels of all clients show of one configuration."""

    adapter: str
    hyperparameters: dict[str, Any]
    clients: Count
    candidate: bool
    guard: Evidence


class ModelEvidence(Document):
    """What the labels of all clients show of each configuration."""

    model: ModelName
    policy: Literal["adapt", "frozen", "follow-fleet"]
    adapters: list[AdapterEvidence]


# clients


class KeptState(Document):
    """An earlier state that can be gone back to."""

    version: Count
    at: datetime
    bytes: Count


class StoredState(Document):
    """A client's state, where it is and how large."""

    version: Count
    status: Literal["reset", "warm", "restored"]
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory that the client takes, as Redis counts it.")]
    tier: Literal["memory", "redis"]
    base: Annotated[int, Field(ge=0, description="Version of the newest complete copy.")]
    base_bytes: Annotated[int, Field(ge=0, description="Of that copy; 0 where there is none yet.")]
    journal_entries: Count
    journal_bytes: Count
    owner: str | None
    expires_in_s: int
    kept: list[KeptState]
    durability: Durability


class Client(Document):
    """A client as it is stored."""

    client_id: str
    model: ModelName
    adapter: str
    hyperparameters: dict[str, Any]
    adaptation: Adaptation
    state: StoredState
    guard: Guard | None


class ListedClient(Document):
    """A client among others."""

    client_id: str
    adapter: str
    hyperparameters: dict[str, Any]
    adaptation: Adaptation
    version: Count
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory that it takes, as Redis counts it.")]
    changed_at: Annotated[datetime | None, Field(description="Its last change, of which batches are the most.")]
    shift: Annotated[
        float | None, Field(description="`shift` of its latest batch, where its adapter measures one and it is noted.")
    ]
    agreement: Annotated[
        Probability | None,
        Field(description="Share of the images of its latest batch on which adapted and frozen predictions agree."),
    ]
    labelled: Annotated[Count | None, Field(description="Rows with a label.")]
    gain: Annotated[
        Annotated[float, Field(ge=-1, le=1)] | None,
        Field(description="Wins less losses, of these rows: what adapting it brings in accuracy; null without labels."),
    ]
    verdict: Annotated[
        Verdict | None,
        Field(description="What its labels show; null where nobody compares, or not under this version."),
    ]


class Usage(Document):
    """What all clients of the caller take, as they were counted last, and the most that they may."""

    clients: Count
    most_clients: Count
    bytes: Annotated[int, Field(ge=0, description="Of Redis's memory.")]
    most_bytes: Annotated[Count | None, Field(description="Null for any number.")]


class Clients(Document):
    """Some of the clients that have a state."""

    model: ModelName
    clients: list[ListedClient]
    usage: Usage
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class FailedClient(Document):
    """A client of several for which it was not done, and why, as a problem says it."""

    client_id: str
    code: str
    detail: str
    state_committed: Committed


class DeletedClients(Document):
    """A page of clients that were to be removed."""

    model: ModelName
    deleted: list[str]
    failed: Annotated[list[FailedClient], Field(description="Those that are, or may be, there still.")]
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class ExportedState(Document):
    """A client and its state."""

    client_id: str
    adapter: str
    hyperparameters: dict[str, Any]
    version: Count
    state: Annotated[str, Field(description="As `GET .../state` gives it, in base64.")]


class ExportedPage(Document):
    """The last line: how many states came, and how many did not."""

    exported: Count
    failed: Count
    next: Annotated[str | None, Field(description="`cursor` of the next page; null after the last.")]


class TimelinePoint(Document):
    """One batch, the mean of several in a row, or something else that befell a client."""

    version: Annotated[Count, Field(description="Of the state, after the last of it.")]
    at: Annotated[datetime, Field(description="When that was stored.")]
    batches: Annotated[Count, Field(description="0 for what is no batch.")]
    images: Count
    signals: Annotated[
        dict[str, float],
        Field(
            description="Means of what the adapter measured, of `agreement`, the share of images on which adapted and "
            "frozen predictions agree, and of `frozen`, the share of batches that the frozen model answered."
        ),
    ]
    prior: Annotated[Absent[list[Probability]], Field(description="Estimated share of each class.")] = None
    modules: Annotated[
        Absent[dict[str, Annotated[float, Field(ge=0)]]],
        Field(description="How far modules have moved, relative to their size; of one batch in 8."),
    ] = None
    events: Annotated[dict[str, Count], Field(description="What else befell the client, and how often.")]
    verdict: Absent[Verdict] = None
    taken_over_from: Annotated[Absent[str], Field(description="Replica that had the client before.")] = None


class Timeline(Document):
    """What became of a client, the oldest first; the older, the coarser."""

    client_id: str
    model: ModelName
    classes: list[str]
    training_prior: Annotated[list[Probability] | None, Field(description="Of the model; null if it has none.")]
    points: list[TimelinePoint]


# what is served


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


# what is sent


File: TypeAlias = Annotated[str, Field(json_schema_extra={"format": "binary"})]
Base64: TypeAlias = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]
Rows: TypeAlias = Annotated[list[list[list[float]]], Field(min_length=1)]
Planes: TypeAlias = Annotated[list[list[list[list[float]]]], Field(min_length=1)]
Labels: TypeAlias = Annotated[list[int | str], Field(min_length=1, description="A class index or name per image.")]


class EncodedImages(Document):
    """Image files in base64."""

    images: Annotated[list[Base64], Field(min_length=1)]


class Images(Document):
    """Images as numbers: uint8 of 0..255 or floating ones of 0..1."""

    images: Rows | Planes
    layout: Absent[Literal["NHWC", "NCHW", "NHW"]] = None
    dtype: Absent[Literal["uint8", "float32"]] = None


class LabelledEncodedImages(EncodedImages):
    """Image files in base64 and their labels."""

    labels: Labels


class LabelledImages(Images):
    """Images as numbers and their labels."""

    labels: Labels


class ImageForm(Document):
    """Image files, in order; the parts may have other names."""

    images: Annotated[list[File], Field(min_length=1)]


class LabelledForm(ImageForm):
    """Image files and their labels."""

    labels: Annotated[str, Field(description='A JSON list, such as `["Ankle boot", 3]`.')]


class Wanted(Document):
    """How a client is to be served; what is left out stays as it is."""

    adapter: Absent[AdapterName] = None
    hyperparameters: Absent[dict[str, Any]] = None
    adaptation: Absent[Adaptation] = None


class Version(Document):
    """A version to go back to; the newest that is kept, if none is named."""

    version: Absent[Annotated[int, Field(ge=1, le=2**53 - 1)]] = None


class LabelledRow(Document):
    """What one row of an earlier answer was."""

    request_id: Annotated[str, Field(max_length=128)]
    row: Count
    label: int | str


class LabelledRows(Document):
    """What rows of earlier answers were."""

    rows: Annotated[list[LabelledRow], Field(min_length=1, max_length=10_000)]


# the Open Inference Protocol


Datatype: TypeAlias = Literal["UINT8", "FP32", "BYTES"]


class Server(Document):
    """The service as the protocol describes it."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Document):
    """An input or output of a model; -1 stands for any extent."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(Document):
    """A model as the protocol describes it."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(Document):
    """Whether requests for a model are answered."""

    name: str
    ready: bool
    reason: str | None


class Durations(Document):
    """How many, and nanoseconds that they took."""

    count: Count
    ns: Count


class InferenceStatistics(Document):
    """Requests that were answered, and that were refused."""

    success: Durations
    fail: Durations


class ModelStatistics(Document):
    """Requests for inference of one model."""

    name: str
    version: str
    last_inference: Annotated[int, Field(description="Unix time in milliseconds; 0 if there was none.")]
    inference_count: Annotated[int, Field(description="Images.")]
    inference_stats: InferenceStatistics


class Statistics(Document):
    """Requests for inference, as this replica counts them."""

    model_stats: list[ModelStatistics]


class IndexEntry(Document):
    """A version of a model of the repository."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: Absent[str] = None


class RepositoryRequest(Document):
    """What Triton's clients send to load or unload a model."""

    parameters: Absent[dict[str, Any]] = None


class LoadedVersion(Document):
    """A version that is loaded."""

    name: str
    version: str


class UnloadedVersions(Document):
    """Versions that are loaded no more."""

    name: str
    versions: list[str]


class InferenceParameters(Document):
    """Whose model answers, and how."""

    client_id: Absent[str] = None
    adapt: Absent[bool] = None
    timeout: Annotated[int, Field(ge=0, description="Microseconds.")] = 0
    binary_data_output: bool = False


class InputParameters(Document):
    """How an input is encoded."""

    binary_data_size: Absent[Count] = None
    layout: Absent[Literal["NHWC", "NCHW", "NHW"]] = None


class InferenceInput(Document):
    """The input of a request."""

    name: Literal["images"]
    shape: Annotated[list[Count], Field(min_length=1)]
    datatype: Datatype
    parameters: InputParameters = InputParameters()
    data: Absent[list[Any]] = None


class OutputParameters(Document):
    """How an output is to be encoded."""

    binary_data: bool = False


class WantedOutput(Document):
    """An output that is wanted."""

    name: Literal["logits", "probabilities", "labels", "signals"]
    parameters: OutputParameters = OutputParameters()


class InferenceRequest(Document):
    """A batch of images for a model."""

    id: str = ""
    parameters: InferenceParameters = InferenceParameters()
    inputs: Annotated[list[InferenceInput], Field(min_length=1, max_length=1)]
    outputs: list[WantedOutput] = []


class InferenceOutput(Document):
    """An output of a model."""

    name: Literal["logits", "probabilities", "labels", "signals"]
    shape: list[Count]
    datatype: Literal["FP32", "BYTES"]
    data: list[float | str]


class InferenceReply(Document):
    """The outputs of a model, and what became of the client's state."""

    model_name: str
    model_version: str
    id: str = ""
    parameters: dict[str, bool | int | str]
    outputs: list[InferenceOutput]


_DOCUMENTS: Final[tuple[type[Document], ...]] = (
    Problem,
    Prediction,
    Change,
    Enrolment,
    Rollback,
    Configured,
    Feedback,
    ClientAsks,
    Asks,
    LastImages,
    ModelEvidence,
    Client,
    Clients,
    DeletedClients,
    FailedClient,
    ExportedState,
    ExportedPage,
    Timeline,
    TimelinePoint,
    Adapters,
    Models,
    ModelManifest,
    Replicas,
    Rollout,
    RolloutWanted,
    Live,
    Ready,
    EncodedImages,
    Images,
    LabelledEncodedImages,
    LabelledImages,
    ImageForm,
    LabelledForm,
    Wanted,
    Version,
    LabelledRows,
    Server,
    ModelMetadata,
    ModelReady,
    Statistics,
    IndexEntry,
    RepositoryRequest,
    LoadedVersion,
    UnloadedVersions,
    InferenceRequest,
    InferenceReply,
)


class _Plain(GenerateJsonSchema):
    """Without titles of members, which repeat their names, and without defaults that are no value."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        return {name: value for name, value in made.items() if (name, value) != ("default", None)}


def components() -> JsonSchemaValue:
    """All documents as JSON Schema, by their names."""
    of: list[tuple[type[BaseModel], Literal["validation"]]] = [(each, "validation") for each in _DOCUMENTS]
    _, schema = models_json_schema(of, ref_template="#/components/schemas/{model}", schema_generator=_Plain)
    definitions: JsonSchemaValue = schema["$defs"]
    return definitions
