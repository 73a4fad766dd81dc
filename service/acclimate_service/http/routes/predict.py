"""Images in: predictions out, or a client enrolled."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from acclimate_service.clients.engine import Batch
from acclimate_service.compute.labelling import Examples
from acclimate_service.http.context import RequestContext, kind_of
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import CHANGING, TENSOR, ClientId, add_route, images_of, json_of
from acclimate_service.http.payload import decoding_labelled
from acclimate_service.http.schemas.common import Enrolment, Prediction
from acclimate_service.http.schemas.sent import (
    EncodedImages,
    ImageForm,
    Images,
    LabelledEncodedImages,
    LabelledForm,
    LabelledImages,
)


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes that take images."""
    limit = intake.served.settings.max_body_bytes

    async def predict(
        request: Request, client_id: ClientId, adapt: bool = True, probabilities: bool = False
    ) -> Response:
        """Predict a batch with the client's own model and, unless `adapt=false`, adapt that model to the batch."""
        context = RequestContext(intake, request, client_id, keyed=adapt, query=("adapt", "probabilities"))
        number = context.batch_number(adapt)
        with context.admitted():
            images = await context.images(limit)
            what = kind_of(images.shape, images.dtype) + f" {probabilities}".encode()
            wanted = await context.request(b"predict", what, images.data.cast("B"), number=number)
            return context.reply(await context.service.predict(Batch(wanted, images, adapt, probabilities)))

    async def enroll(request: Request, client_id: ClientId) -> Response:
        """Let the client restart from labelled images of its own."""
        context = RequestContext(intake, request, client_id)
        with context.admitted():
            body, manifest = await context.body(limit), context.service.bundle.manifest
            work = decoding_labelled(
                body, context.content_type, context.headers, manifest.input, intake.limits, manifest.classes
            )
            images, labels = await context.decoded(work, len(body))
            context.hold_images(images)
            kind = kind_of(images.shape, images.dtype)
            wanted = await context.request(b"enroll", kind, images.data.cast("B"), labels.tobytes())
            return context.reply(await context.service.enroll(wanted, Examples(images, labels)))

    body, headers = images_of(ImageForm, EncodedImages, Images), (*CHANGING, "X-Batch-Number", *TENSOR)
    path, reply = "/clients/{client_id}/predict", json_of(Prediction)
    add_route(router, "POST", path, predict, "predict", "batches", reply, body=body, headers=headers)
    body, headers = images_of(LabelledForm, LabelledEncodedImages, LabelledImages), (*CHANGING, "X-Labels", *TENSOR)
    path, reply = "/clients/{client_id}/enroll", json_of(Enrolment)
    add_route(router, "POST", path, enroll, "enroll", "labels", reply, body=body, headers=headers)
