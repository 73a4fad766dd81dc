"""Images in: predictions out, or a client enrolled."""

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from numpy.typing import NDArray
from starlette.responses import Response

from acclimate_service.clients import Examples
from acclimate_service.engine import Batch
from acclimate_service.payload import MEDIA_TYPES, decode, decode_labelled
from acclimate_service.routes.desk import Desk, check_tokens

_DOC = {"requestBody": {"required": True, "content": {media_type: {} for media_type in MEDIA_TYPES}}}


def add_routes(router: APIRouter, desk: Desk) -> None:
    """Add the routes that take images."""
    service, limit = desk.service, desk.settings.max_body_bytes
    spec, classes = service.bundle.manifest.input, service.bundle.manifest.classes

    async def predict(
        request: HttpRequest, client_id: str, adapt: bool = True, probabilities: bool = False
    ) -> Response:
        """Predict a batch with the client's own model and, unless `adapt=false`, adapt that model to the batch."""

        def parse(body: bytes) -> tuple[NDArray[Any], tuple[bytes, ...]]:
            media_type = request.headers.get("content-type", "")
            check_tokens(body, media_type)
            images = decode(body, media_type, request.headers, spec, desk.limits)
            return images, (b"predict", f"{_kind(images)} {probabilities}".encode(), images.tobytes())

        with service.engine.admission():
            wanted, images = await desk.take(request, client_id, limit, parse, keyed=adapt)
            done = await service.engine.predict(Batch(wanted, images, adapt, probabilities))
            return desk.reply(request, done, wanted)

    async def enroll(request: HttpRequest, client_id: str) -> Response:
        """Let the client begin anew from labelled images of its own."""

        def parse(body: bytes) -> tuple[Examples, tuple[bytes, ...]]:
            media_type = request.headers.get("content-type", "")
            check_tokens(body, media_type)
            images, labels = decode_labelled(body, media_type, request.headers, spec, desk.limits, classes)
            mark = (b"enroll", _kind(images).encode(), images.tobytes(), labels.tobytes())
            return Examples(images, labels), mark

        with service.engine.admission():
            wanted, examples = await desk.take(request, client_id, limit, parse)
            return desk.reply(request, await service.clients.enroll(wanted, examples), wanted)

    router.add_api_route("/clients/{client_id}/predict", predict, methods=["POST"], openapi_extra=_DOC)
    router.add_api_route("/clients/{client_id}/enroll", enroll, methods=["POST"], openapi_extra=_DOC)


def _kind(images: NDArray[Any]) -> str:
    return f"{images.shape} {images.dtype}"
