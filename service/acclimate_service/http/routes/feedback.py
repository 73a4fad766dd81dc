"""True labels in; what they show of the adapters out."""

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_service.compute.labelling import Examples
from acclimate_service.errors import Problem
from acclimate_service.guard.record import Label
from acclimate_service.http.context import RequestContext, kind_of
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import CHANGING, TENSOR, ClientId, add_route, images_of, json_of
from acclimate_service.http.payload import (
    Json,
    decoding_labelled,
    decoding_labelled_document,
    load_json,
    media_type,
)
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.labels import Feedback, ModelEvidence
from acclimate_service.http.schemas.sent import LabelledEncodedImages, LabelledForm, LabelledImages, LabelledRows

_MOST_ROWS = 10_000
_LONGEST_BODY = 4 * 2**20
_LONGEST_ID = 128
_FORM = '{"rows": [{"request_id": "<of the answer>", "row": <place in the batch>, "label": <class name or index>}]}'


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes of the guard."""
    limit = max(intake.served.settings.max_body_bytes, _LONGEST_BODY)

    async def feedback(request: Request, client_id: ClientId) -> Response:
        """Tell what rows of earlier answers were, each label once; or what images are that come with their labels."""
        context = RequestContext(intake, request, client_id)
        with context.admitted():
            body, manifest = await context.body(limit), context.service.bundle.manifest
            if media_type(context.content_type) == "application/json":
                document = await context.computed(partial(load_json, body))
                if not isinstance(document, dict) or "rows" in document or "images" not in document:
                    labels = await context.computed(partial(_read, document, manifest.classes))
                    mark = orjson.dumps([[each.request_id, each.row, each.label] for each in labels])
                    return context.reply(await context.service.tell(await context.request(b"feedback", mark), labels))
                work = decoding_labelled_document(document, manifest.input, intake.limits, manifest.classes)
            else:
                work = decoding_labelled(
                    body, context.content_type, context.headers, manifest.input, intake.limits, manifest.classes
                )
            images, classes = await context.decoded(work, len(body))
            context.hold_images(images)
            kind = kind_of(images.shape, images.dtype)
            wanted = await context.request(b"examples", kind, images.data.cast("B"), classes.tobytes())
            return context.reply(await context.service.tell(wanted, Examples(images, classes)))

    body = images_of(LabelledForm, LabelledRows, LabelledEncodedImages, LabelledImages)
    headers = (*CHANGING, "X-Labels", *TENSOR)
    path, reply = "/clients/{client_id}/feedback", json_of(Feedback)
    add_route(router, "POST", path, feedback, "tell_labels", "labels", reply, body=body, headers=headers)


def add_evidence(router: APIRouter, intake: Intake) -> None:
    """Add the route that tells the evidence about a model."""

    async def evidence() -> Response:
        """What the labels of all clients show of each adapter, under the default version."""
        service = intake.served.default
        challengers = service.challengers.configurations if service.challengers else ()
        return json({"model": service.model, **await service.feedback.of_all(challengers)})

    add_route(router, "GET", "/adapters", evidence, "describe_evidence", "labels", json_of(ModelEvidence))


def _read(document: Json, classes: tuple[str, ...]) -> list[Label]:
    """The labels of a body.

    Raises:
        Problem: `invalid_feedback` with what is accepted.
    """
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_ROWS:
        raise Problem("invalid_feedback", f"the body must be an object with 1 to {_MOST_ROWS} rows: {_FORM}")
    indices = {name: index for index, name in enumerate(classes)}
    return [_label(number, row, indices) for number, row in enumerate(rows)]


def _label(number: int, row: Any, indices: dict[str, int]) -> Label:
    found = row if isinstance(row, dict) else {}
    request_id, place, label = found.get("request_id"), found.get("row"), found.get("label")
    if not isinstance(request_id, str) or len(request_id) > _LONGEST_ID or type(place) is not int or place < 0:
        raise Problem("invalid_feedback", f"row {number} is not as expected: {_FORM}")
    index = indices.get(label) if isinstance(label, str) else label
    if type(index) is not int or not 0 <= index < len(indices):
        known = ", ".join(indices)
        detail = f"row {number} has label {str(label)[:40]!r}; accepted are 0 to {len(indices) - 1}, or {known[:400]}"
        raise Problem("invalid_feedback", detail)
    return Label(request_id, place, index)
