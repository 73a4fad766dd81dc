"""The last images of a client, where the operator keeps any."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from PIL import Image
from starlette.responses import Response

from acclimate_service.clients.last_images import LastImage
from acclimate_service.http.context import RequestContext
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import CHANGING, ClientId, add_route, json_of
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.labels import LastImages

_COLOURS: Final = (1, 3)
"""Numbers of channels that can be shown as a picture."""
_QUICK: Final = 1
"""Compression of PNG."""


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the route of images."""

    async def images(request: Request, client_id: ClientId) -> Response:
        """The client's last images that the replica has, the newest first, by which their labels can be told."""
        context = RequestContext(intake, request, client_id, keyed=False, query=None)
        with context.admitted():
            service = context.service
            found = await service.last_images.of(await context.request(b"images"))
            shown = await asyncio.to_thread(_shown, found, service.bundle.manifest.classes)
        return json({"client_id": client_id, "model": service.model, "images": shown})

    path, reply = "/clients/{client_id}/images", json_of(LastImages)
    add_route(router, "GET", path, images, "list_images_of_client", "labels", reply, headers=CHANGING[1:])


def _shown(images: Sequence[LastImage], classes: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "request_id": each.kept.request_id,
            "row": each.kept.row,
            "predicted": classes[each.kept.predicted],
            "asked": each.asked,
            "label": None if each.label is None else classes[each.label],
            "png": _png(each.kept.image) if each.kept.image.shape[0] in _COLOURS else None,
        }
        for each in images
    ]


def _png(image: NDArray[Any]) -> str:
    """An image [C, H, W], uint8 or float32 in 0..1, as base64 of PNG."""
    pixels = image if image.dtype == np.uint8 else (image.clip(0, 1) * 255).round().astype(np.uint8)
    made = BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(
        made, "PNG", compress_level=_QUICK
    )
    return b64encode(made.getvalue()).decode()
