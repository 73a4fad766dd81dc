"""True labels in; what they show of the adapters out."""

from typing import Any

import orjson
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from acclimate_service.guard.record import Label
from acclimate_service.problems import Problem
from acclimate_service.routes.desk import Desk, json

_MOST_ROWS = 10_000
_LONGEST_BODY = 4 * 2**20
_LONGEST_ID = 128
_FORM = '{"rows": [{"request_id": "<of the answer>", "row": <place in the batch>, "label": <class name or index>}]}'
_SCHEMA = {
    "type": "object",
    "required": ["rows"],
    "properties": {
        "rows": {
            "type": "array",
            "minItems": 1,
            "maxItems": _MOST_ROWS,
            "items": {
                "type": "object",
                "required": ["request_id", "row", "label"],
                "properties": {
                    "request_id": {"type": "string", "maxLength": _LONGEST_ID},
                    "row": {"type": "integer", "minimum": 0},
                    "label": {"type": ["string", "integer"]},
                },
            },
        }
    },
}
_DOC = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes of the guard."""
    service = desk.service
    classes = service.bundle.manifest.classes

    async def feedback(request: HttpRequest, client_id: str) -> Response:
        """Tell what rows of earlier answers were; each label counts once."""

        def parse(body: bytes) -> tuple[list[Label], tuple[bytes, ...]]:
            labels = _read(body, classes)
            mark = orjson.dumps([[each.request_id, each.row, each.label] for each in labels])
            return labels, (b"feedback", mark)

        wanted, labels = await desk.take(request, client_id, _LONGEST_BODY, parse)
        return desk.reply(await service.feedback.tell(wanted, labels), wanted)

    async def evidence(model: str) -> Response:
        """What the labels of all clients show of each adapter."""
        if model != service.bundle.manifest.name:
            raise Problem("not_found", f"this service serves {service.bundle.manifest.name!r} alone; see GET /models")
        return json({"model": desk.model, **await service.feedback.of_all()})

    router.add_api_route("/clients/{client_id}/feedback", feedback, methods=["POST"], openapi_extra=_DOC)
    router.add_api_route("/models/{model}/adapters", evidence, methods=["GET"])


def _read(body: bytes, classes: tuple[str, ...]) -> list[Label]:
    """The labels of a body.

    Raises:
        Problem: `malformed_body`, or `invalid_feedback` with what is accepted.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem("malformed_body", f"the body is not valid JSON: {error}") from error
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
