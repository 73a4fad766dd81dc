"""The documents of the interface as types: what `/openapi.json` describes, and what tests hold replies against.

Nothing is read or written through them while requests are served. A member that a reply may lack has a default, which
says what its absence means.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

from acclimate_service.http.schemas.clients import (
    Client,
    Clients,
    DeletedClients,
    ExportedPage,
    ExportedState,
    FailedClient,
    Timeline,
    TimelinePoint,
)
from acclimate_service.http.schemas.common import Change, Configured, Document, Enrolment, Prediction, Problem, Rollback
from acclimate_service.http.schemas.inference import (
    IndexEntry,
    InferenceReply,
    InferenceRequest,
    LoadedVersion,
    ModelMetadata,
    ModelReady,
    RepositoryRequest,
    Server,
    Statistics,
    UnloadedVersions,
)
from acclimate_service.http.schemas.labels import Asks, ClientAsks, Feedback, LastImages, ModelEvidence
from acclimate_service.http.schemas.sent import (
    EncodedImages,
    ImageForm,
    Images,
    LabelledEncodedImages,
    LabelledForm,
    LabelledImages,
    LabelledRows,
    Version,
    Wanted,
)
from acclimate_service.http.schemas.served import (
    Adapters,
    Live,
    ModelManifest,
    Models,
    Ready,
    Replicas,
    Rollout,
    RolloutWanted,
)

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
