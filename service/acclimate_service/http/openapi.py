"""How routes are added and described in `/openapi.json`: the framework sees no body, header or reply."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Path
from fastapi.openapi.utils import get_openapi
from pydantic import AwareDatetime, BeforeValidator
from starlette.responses import Response

from acclimate_service.http.payload import MEDIA_TYPES
from acclimate_service.http.problems import MEDIA_TYPE, RESPONSES
from acclimate_service.http.schemas import components
from acclimate_service.http.schemas.common import Document, Problem

Content = Mapping[str, Any]
ClientId = Annotated[
    str, Path(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]*$", "maxLength": 128})  # checked elsewhere
]
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]")


def _require_date(text: str) -> str:
    if not _DATE.match(text):
        raise ValueError("it is a time such as 2026-11-28T16:00:00Z")
    return text


Time = Annotated[AwareDatetime, BeforeValidator(_require_date)]
"""Of RFC 3339; pydantic would take a number for seconds."""
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/jsonl"
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_TAGS: Final = {
    "batches": "Images in, predictions out.",
    "clients": "A client, its adapter and its state.",
    "labels": "What images really were, and what that shows.",
    "service": "What is served, whether it answers, and metrics.",
    "inference protocol": "The Open Inference Protocol, version 2.",
}
_HEADERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "Idempotency-Key": (
        "A repeated key gets the first answer, and nothing is applied again.",
        {"type": "string", "pattern": "^[!-~]([ -~]*[!-~])?$", "maxLength": 255},
    ),
    "X-Request-Timeout-Ms": ("Milliseconds until the deadline.", {"type": "integer", "minimum": 1, "maximum": 600_000}),
    "X-Batch-Number": (
        "Place of the batch in the client's stream.",
        {"type": "integer", "minimum": 1, "maximum": 2**53 - 1},
    ),
    "X-Tensor-Shape": (
        "Of a body of application/octet-stream.",
        {"type": "string", "pattern": "^[0-9]{1,10}( *, *[0-9]{1,10}){2,3}$", "example": "20,28,28,1"},
    ),
    "X-Tensor-Layout": ("Of a body that is an array.", {"type": "string", "enum": ["NHWC", "NCHW", "NHW"]}),
    "X-Tensor-Dtype": ("Of a body of application/octet-stream.", {"type": "string", "enum": ["uint8", "float32"]}),
    "X-Labels": (
        "A JSON list of labels, beside a body that has no place for them.",
        {"type": "string", "pattern": r"^\[.*\]$", "example": '["Ankle boot", 3]'},
    ),
    "If-Match": (
        "Versions that may be replaced, as ETags, or `*` for any.",
        {"type": "string", "pattern": '^(\\*|"v[0-9]{1,15}"(, *"v[0-9]{1,15}")*)$', "example": '"v5"'},
    ),
    "Last-Event-ID": ("Version after which to go on.", {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}),
    "Inference-Header-Content-Length": ("How many bytes of the body are JSON.", {"type": "integer", "minimum": 1}),
}
CHANGING: Final = ("Idempotency-Key", "X-Request-Timeout-Ms")
"""Headers of requests that change a client."""
TENSOR: Final = ("X-Tensor-Shape", "X-Tensor-Layout", "X-Tensor-Dtype")
"""Headers beside a body that is an array."""
_ETAG: Final = {"ETag": {"description": "Version of the state.", "schema": {"type": "string"}}}


def json_of(*documents: type[Document], media_type: str = JSON) -> Content:
    """JSON as a body or reply, or on each of its lines: one of these."""
    first, *others = map(ref, documents)
    return {media_type: {"schema": {"anyOf": [first, *others]} if others else first}}


def images_of(form: type[Document], *documents: type[Document]) -> Content:
    """Bodies of images: a form, JSON that is one of these documents, or anything else that images are read from."""
    others = {media_type: _BINARY for media_type in MEDIA_TYPES if media_type not in (JSON, "multipart/form-data")}
    return {**json_of(*documents), "multipart/form-data": {"schema": ref(form)}, **others}


def events_of(document: type[Document]) -> Content:
    """Server-sent events, whose data are such documents."""
    return {EVENTS: {"schema": ref(document)}}


def bytes_of(media_type: str = BYTES) -> Content:
    """Bytes, or text, as a body or reply."""
    return {media_type: {"schema": {"type": "string"}} if "text" in media_type else _BINARY}


def add_route(
    router: APIRouter,
    method: str,
    path: str,
    handler: Callable[..., Any],
    name: str,
    tag: str,
    reply: Content | None,
    *,
    body: Content | None = None,
    body_required: bool = True,
    headers: Sequence[str] = (),
    names: Sequence[str] = (),
    unavailable: Content | None = None,
) -> None:
    """Add a route, and describe it.

    Args:
        router: that it is added to.
        method, path, handler: of the route.
        name: as a person calls what it does; what programs that are generated call their function.
        tag: a heading.
        reply: content of the reply; None if it is empty.
        body: content of the body, by its media types; None if it has none.
        body_required: whether it must be there.
        headers: names of those that it takes.
        names: parameters of its path that the handler's signature does not have.
        unavailable: content of a reply of 503 that is no problem.
    """
    status = 204 if reply is None else 200
    done: dict[str, Any] = {"description": "Done."} if reply is None else {"description": "Done.", "content": reply}
    if reply and BYTES in reply and JSON not in reply:
        done["headers"] = _ETAG
    responses = {status: done, **RESPONSES}
    if unavailable is not None:
        either = {**unavailable, MEDIA_TYPE: {"schema": ref(Problem)}}
        responses[503] = {"description": "Not now.", "content": either}
    in_path = [{"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names]
    extra: dict[str, Any] = {"parameters": [*in_path, *map(_parameter, headers)]}
    if body is not None:
        extra["requestBody"] = {"required": body_required, "content": body}
    router.add_api_route(
        path,
        handler,
        methods=[method],
        operation_id=name,
        tags=[tag],
        status_code=status,
        response_class=Response,
        responses=responses,
        openapi_extra=extra,
    )


def of_model(name: str, model: str) -> str:
    """What an operation is called where it names the model."""
    return f"{name}_of_{model}"


def describe(app: FastAPI, models: Sequence[str], root_path: str = "") -> dict[str, Any]:
    """The document of an application that serves these models, below this path if a proxy shows it there."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=[{"url": root_path}] if root_path else None,
        tags=[{"name": name, "description": description} for name, description in _TAGS.items()],
    )
    paths = made["paths"]
    for path in [each for each in paths if each.startswith("/models/")]:
        operations = paths.pop(path)
        _, _, name, rest = path.split("/", 3)
        if name == models[0]:
            for each in operations.values():
                each["operationId"] = of_model(each["operationId"].removesuffix(of_model("", name)), "model")
                parameters = each.setdefault("parameters", [])
                schema = {"type": "string", "enum": list(models)}
                parameters.insert(0, {"name": "model", "in": "path", "required": True, "schema": schema})
            paths[f"/models/{{model}}/{rest}"] = operations
    key = {"type": "http", "scheme": "bearer", "description": "A key, where the service asks for one."}
    made["components"] = {"schemas": components(), "securitySchemes": {"key": key}}
    made["security"] = [{}, {"key": []}]
    return made


def ref(document: type[Document]) -> dict[str, str]:
    """The schema of a document."""
    return {"$ref": f"#/components/schemas/{document.__name__}"}


def _parameter(header: str) -> dict[str, Any]:
    description, schema = _HEADERS[header]
    return {"name": header, "in": "header", "required": False, "description": description, "schema": schema}
