"""Documents of the Open Inference Protocol."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from acclimate_service.http.schemas.common import Absent, Count, Document

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
    outputs: tuple[WantedOutput, ...] = ()


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
