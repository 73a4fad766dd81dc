"""The Open Inference Protocol, version 2, with Triton's extensions for tensors as bytes and for what is served."""

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from acclimate_adapters.adapter import complete
from acclimate_service.clients.engine import Batch
from acclimate_service.clients.requests import Reply
from acclimate_service.compute.steps import StepParameters
from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext, at_once, kind_of
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import JSON, Content, add_route, bytes_of, json_of, ref
from acclimate_service.http.payload import INPUT, Inference, decoding_tensor, load_json, read_inference
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.inference import (
    IndexEntry,
    InferenceReply,
    InferenceRequest,
    ModelMetadata,
    ModelReady,
    Server,
    Statistics,
)
from acclimate_service.rollout import Rollout
from acclimate_service.service import Service
from acclimate_store import Manifest

_HEADER: Final = "Inference-Header-Content-Length"
_QUICK: Final = 16 * 1024
"""Bytes of JSON that are parsed in a fraction of a millisecond."""
_LONGEST_INDEX: Final = 1024
_EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
)
_LACKING: Final[Mapping[str, str]] = {
    "/systemsharedmemory/{rest:path}": "tensors come and go in the body, not in shared memory",
    "/cudasharedmemory/{rest:path}": "tensors come and go in the body, not in memory of a device",
    "/trace/setting": "traces are set up where the service is started",
    "/models/{model}/trace/setting": "traces are set up where the service is started",
    "/logging": "the log is set up where the service is started",
}
"""What extensions of the protocol have at these paths, and why it is not here."""


@dataclass(slots=True)
class _Counts:
    """Requests for inference of one model: how many, and nanoseconds that they took; milliseconds of the last one."""

    answered: int = 0
    answered_ns: int = 0
    refused: int = 0
    refused_ns: int = 0
    rows: int = 0
    last_ms: int = 0

    def answer(self, began_ns: int, rows: int) -> None:
        """Count a request that was answered."""
        self.answered += 1
        self.answered_ns += time.perf_counter_ns() - began_ns
        self.rows += rows
        self.last_ms = time.time_ns() // 1_000_000

    def refuse(self, began_ns: int) -> None:
        """Count a request that was not."""
        self.refused += 1
        self.refused_ns += time.perf_counter_ns() - began_ns


class _Version:
    """A version of a model as the protocol describes it."""

    def __init__(self, service: Service) -> None:
        self.counts = _Counts()
        self.name, self.version = service.model["name"], service.model["version"]
        self.manifest = service.bundle.manifest
        self.max_images = service.settings.max_images

    def statistics(self) -> dict[str, Any]:
        """What the route of statistics says."""
        counts = self.counts
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": counts.last_ms,
            "inference_count": counts.rows,
            "inference_stats": {
                "success": {"count": counts.answered, "ns": counts.answered_ns},
                "fail": {"count": counts.refused, "ns": counts.refused_ns},
            },
        }


class InferenceRoutes:
    """The handlers of the protocol.

    Args:
        intakes: of all models, the default one first.
    """

    def __init__(self, intakes: Sequence[Intake]) -> None:
        self._models = {each.name: each for each in intakes}
        self._replica = intakes[0].replica
        self._known = WeakKeyDictionary[Service, _Version]()
        self._server = json({"name": "acclimate", "version": self._replica.version, "extensions": _EXTENSIONS})

    async def server_metadata(self) -> Response:
        """Name and version of the service, and the extensions of the protocol that it speaks."""
        return self._server

    async def model_metadata(self, request: Request) -> Response:
        """Input and outputs of a model."""
        version, rollout = self._one_of(request)
        return json(_metadata(version.manifest, rollout.loaded))

    async def model_config(self, request: Request) -> Response:
        """Input, outputs and largest batch of a model, as Triton's clients read them, and who is answered by what."""
        return json(_config(*self._one_of(request)))

    async def model_statistics(self, request: Request) -> Response:
        """Requests for inference that this replica was sent for a model, by this protocol, version by version."""
        intake, service = self._found(request)
        asked = self._all_of(intake) if service is None else [self._version_of(service)]
        return json({"model_stats": [each.statistics() for each in asked]})

    async def all_statistics(self) -> Response:
        """As of one model, of all."""
        return json({"model_stats": [each.statistics() for of in self._models.values() for each in self._all_of(of)]})

    async def model_ready(self, request: Request) -> Response:
        """Whether requests for a model are answered."""
        name, reason = self._found(request)[0].name, await self._replica.obstacle()
        reply = json({"name": name, "ready": reason is None, "reason": reason}, 200 if reason is None else 503)
        if reason is not None:
            reply.headers["Retry-After"] = "1"
        return reply

    async def index(self, request: Request) -> Response:
        """The versions of models that are loaded, and those that cannot be, with the reason."""
        intakes = self._models.values()
        context = RequestContext(next(iter(intakes)), request, None)
        with context.admitted():
            await context.computed(partial(_check_index, await context.body(_LONGEST_INDEX)))
        loaded = [each for intake in intakes for each in self._all_of(intake)]
        ready = [{"name": each.name, "version": each.version, "state": "READY"} for each in loaded]
        return json([*ready, *(lacking for intake in intakes for lacking in _failed(intake))])

    async def infer(self, request: Request) -> Response:
        """Predict a batch: with the model of the client that `client_id` names, or with the global one."""
        intake, version = self._found(request)
        context = RequestContext(intake, request, None, version=version)
        began = time.perf_counter_ns()
        try:
            with context.admitted():
                reply, rows = await _infer(intake, context)
        except BaseException:
            self._version_of(context.service).counts.refuse(began)
            raise
        self._version_of(context.service).counts.answer(began, rows)
        return reply

    def _found(self, request: Request) -> tuple[Intake, Service | None]:
        """The model of a path, and its version where the path names one; raises Problem `not_found`."""
        name, version = request.path_params["model"], request.path_params.get("version")
        intake = self._models.get(name)
        service = None if intake is None or version is None else intake.served.versions.get(version)
        if intake is None or (version is not None and service is None):
            what = f"{name[:64]!r}" + ("" if version is None else f" of version {version[:64]!r}")
            served = (
                (each.name, version) for each in self._models.values() for version in sorted(each.served.versions)
            )
            known = ", ".join(f"{name} {version}" for name, version in served)
            raise Problem("not_found", f"there is no model {what}; served are {known}")
        return intake, service

    def _one_of(self, request: Request) -> tuple[_Version, Rollout]:
        intake, service = self._found(request)
        return self._version_of(service or intake.served.default), intake.served.applied

    def _all_of(self, intake: Intake) -> list[_Version]:
        """All versions of a model, the default one first."""
        served = intake.served
        others = (each for each in served.versions.values() if each is not served.default)
        return [self._version_of(each) for each in (served.default, *others)]

    def _version_of(self, service: Service) -> _Version:
        if service not in self._known:
            self._known[service] = _Version(service)
        return self._known[service]


def add_routes(router: APIRouter, intakes: Sequence[Intake]) -> None:
    """Add the routes of the protocol.

    Args:
        router: that they are added to.
        intakes: of all models, the default one first.
    """
    handlers = InferenceRoutes(intakes)

    def add(
        path: str, name: str, handler: Callable[..., Any], reply: Content, method: str = "GET", **more: Any
    ) -> None:
        add_route(router, method, f"/v2{path}", handler, name, "inference protocol", reply, **more)

    tensors = {**json_of(InferenceReply), **bytes_of()}
    asked = {**json_of(InferenceRequest), **bytes_of()}
    headers = ("X-Request-Timeout-Ms", "X-Batch-Number", _HEADER)
    add("", "describe_server", handlers.server_metadata, json_of(Server))
    add("/models/stats", "count_inferences", handlers.all_statistics, json_of(Statistics))
    entries = {JSON: {"schema": {"type": "array", "items": ref(IndexEntry)}}}
    add("/repository/index", "list_repository", handlers.index, entries, "POST")
    anything, ready = {JSON: {"schema": {"type": "object"}}}, json_of(ModelReady)
    one = ("/models/{model}", "model", ("model",))
    for path, of, names in (one, ("/models/{model}/versions/{version}", "version", ("model", "version"))):
        add(path, f"describe_{of}", handlers.model_metadata, json_of(ModelMetadata), names=names)
        add(f"{path}/config", f"configuration_of_{of}", handlers.model_config, anything, names=names)
        add(f"{path}/stats", f"count_inferences_of_{of}", handlers.model_statistics, json_of(Statistics), names=names)
        add(f"{path}/ready", f"is_{of}_ready", handlers.model_ready, ready, unavailable=ready, names=names)
        add(
            f"{path}/infer",
            f"infer_with_{of}",
            handlers.infer,
            tensors,
            "POST",
            body=asked,
            headers=headers,
            names=names,
        )
    for path, reason in _LACKING.items():
        router.add_api_route(f"/v2{path}", _lacking(reason), methods=["GET", "POST"], include_in_schema=False)


def _lacking(reason: str) -> Any:
    async def lacking() -> Response:
        raise Problem("unsupported", f"this extension of the protocol is not supported: {reason}")

    return lacking


async def _infer(intake: Intake, context: RequestContext) -> tuple[Response, int]:
    """Answer a request whose body was not read yet; and how many rows it had."""
    if "idempotency-key" in context.headers:
        raise Problem("invalid_request", "the key of such a request is its id; leave out the header Idempotency-Key")
    body, json_bytes = await context.body(intake.served.settings.max_body_bytes), _json_bytes(context.headers)
    read = partial(read_inference, body, json_bytes)
    quick = len(body) if json_bytes is None else json_bytes
    asked = read() if quick <= _QUICK else await context.computed(read)
    client, adapt = _whose(asked, context)
    images = await _images(asked, context, intake)
    probabilities, logits = "probabilities" in asked.outputs, "logits" in asked.outputs
    if client is None:
        done = await context.service.predict_frozen(
            images, StepParameters(probabilities=probabilities, logits=logits), context.caller()
        )
    else:
        what = kind_of(images.shape, images.dtype) + f" v2 {probabilities} {logits}".encode()
        wanted = await context.request(b"predict", what, images.data.cast("B"), number=context.batch_number(adapt))
        done = await context.service.predict(Batch(wanted, images, adapt, probabilities, logits))
    return _reply(context, asked, done), len(images)


def _whose(asked: Inference, context: RequestContext) -> tuple[str | None, bool]:
    """The client that a request is for, if any, and whether its batch is to be folded in.

    Raises:
        Problem: as `RequestContext.assign`; `invalid_request`.
    """
    client, timeout_us = asked.parameters.get("client_id"), asked.parameters.get("timeout", 0)
    adapt: bool = asked.parameters.get("adapt", client is not None)
    if timeout_us < 0:
        raise Problem("invalid_request", "the parameter timeout is a number of microseconds, or 0 for none")
    if timeout_us:
        context.wait_at_most(timeout_us / 1e6)
    if client is not None:
        context.assign(client, (asked.id or None) if adapt else None)
    elif adapt or "x-batch-number" in context.headers:
        raise Problem("invalid_request", "there is no client to adapt to; name one by the parameter client_id")
    return client, adapt


async def _images(asked: Inference, context: RequestContext, intake: Intake) -> NDArray[Any]:
    tensor = asked.images
    work = decoding_tensor(tensor, context.service.bundle.manifest.input, intake.limits)
    if isinstance(tensor.data, memoryview) and tensor.datatype != "BYTES":
        images = await at_once(partial(complete, work), len(tensor.data))
    else:
        images = await context.decoded(work)
    context.hold_images(images)
    return images


def _json_bytes(headers: Mapping[str, str]) -> int | None:
    """How many bytes of the body are JSON; None if all are.

    Raises:
        Problem: `invalid_request`.
    """
    text = headers.get(_HEADER.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Problem(
            "invalid_request", f"{_HEADER} is the number of bytes that are JSON, at the beginning of the body"
        )
    return int(text)


def _reply(context: RequestContext, asked: Inference, done: Reply) -> Response:
    """The outputs that were asked for, and of the client's state what our own routes say of it, as parameters."""
    answer, pieces = done.members, list[bytes]()
    model, classes = context.model_of(done), len(context.service.bundle.manifest.classes)
    outputs = [_output(name, answer, classes, pieces if asked.outputs[name] else None) for name in asked.outputs]
    state = {f"state_{name}": value for name, value in context.state_of(done).items()}
    parameters = {"adapter": answer["adapter"], "request_id": answer.get("request_id", context.request_id), **state}
    if "client_id" in asked.parameters:
        parameters["client_id"] = asked.parameters["client_id"]
    document = {
        "model_name": model["name"],
        "model_version": model["version"],
        **({"id": asked.id} if asked.id else {}),
        "parameters": parameters,
        "outputs": outputs,
    }
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not any(asked.outputs.values()):
        return Response(head, media_type="application/json")
    body = b"".join((head, *pieces))
    return Response(body, headers={_HEADER: str(len(head))}, media_type="application/octet-stream")


def _output(name: str, answer: Mapping[str, Any], classes: int, pieces: list[bytes] | None) -> dict[str, Any]:
    """An output as JSON describes it; its values are among the pieces, where there are any, or else in it."""
    data: NDArray[Any] | list[str]
    if name in ("logits", "probabilities"):
        values = np.array(answer.get(name, ()), dtype="<f4").reshape(-1, classes)
        described, data = {"shape": list(values.shape), "datatype": "FP32"}, values.ravel()
    else:
        labels = [each["label"] for each in answer["predictions"]]
        data = labels if name == "labels" else [orjson.dumps(answer["signals"]).decode()]
        described = {"shape": [len(data)], "datatype": "BYTES"}
    if pieces is None:
        return {"name": name, **described, "data": data}
    pieces.append(_with_lengths(data) if isinstance(data, list) else data.tobytes())
    return {"name": name, **described, "parameters": {"binary_data_size": len(pieces[-1])}}


def _with_lengths(texts: Iterable[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def _metadata(manifest: Manifest, versions: Sequence[str]) -> dict[str, Any]:
    outputs = {"logits": "FP32", "probabilities": "FP32", "labels": "BYTES", "signals": "BYTES"}
    shapes = {"labels": [-1], "signals": [1]}
    return {
        "name": manifest.name,
        "versions": list(versions),
        "platform": "acclimate",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, *manifest.input.shape]}],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shapes.get(name, [-1, len(manifest.classes)])}
            for name, datatype in outputs.items()
        ],
    }


def _config(version: _Version, rollout: Rollout) -> dict[str, Any]:
    manifest = version.manifest
    described = _metadata(manifest, rollout.loaded)
    types = {"BYTES": "STRING"}

    def tensor(of: Mapping[str, Any]) -> dict[str, Any]:
        data_type = f"TYPE_{types.get(of['datatype'], of['datatype'])}"
        return {"name": of["name"], "data_type": data_type, "dims": of["shape"]}

    return {
        "name": manifest.name,
        "platform": "acclimate",
        "backend": "acclimate",
        "version_policy": {"specific": {"versions": list(rollout.loaded)}},
        "max_batch_size": 0,
        "input": [tensor(each) for each in described["inputs"]],
        "output": [tensor(each) for each in described["outputs"]],
        "parameters": {
            "max_images": {"string_value": str(version.max_images)},
            **{
                f"share_of_clients:{each}": {"string_value": f"{rollout.share_of(each):.4g}"} for each in rollout.loaded
            },
        },
    }


def _failed(intake: Intake) -> list[dict[str, str]]:
    """Versions that are wanted and cannot be had here."""
    served = intake.served
    return [
        {"name": served.name, "version": version, "state": "UNAVAILABLE", "reason": reason}
        for version, reason in sorted(served.failed.items())
    ]


def _check_index(body: bytes) -> None:
    """What may be asked, `{"ready": true}`, leaves out what is not loaded."""
    document = load_json(body) if body else {}
    if not isinstance(document, dict) or document.keys() - {"ready"} or type(document.get("ready", True)) is not bool:
        raise Problem("invalid_request", 'the body must be empty, or an object with this member only: {"ready": true}')
