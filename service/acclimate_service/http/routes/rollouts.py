"""Versions that come and go at run time: loaded and unloaded as the protocol has it, and given clients as we do."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from acclimate_service.errors import Problem
from acclimate_service.http.context import RequestContext
from acclimate_service.http.intake import Intake
from acclimate_service.http.openapi import add_route, json_of
from acclimate_service.http.payload import load_json
from acclimate_service.http.replies import json
from acclimate_service.http.schemas.inference import LoadedVersion, RepositoryRequest, UnloadedVersions
from acclimate_service.http.schemas.served import Rollout, RolloutWanted
from acclimate_service.rollout import Assignment, Seen
from acclimate_service.served import Served

_LONGEST: Final = 4096
_FORM: Final = (
    '{"default": "<version>", "canary": {"version": "<version>", "share": <0 to 1>}, '
    '"shadow": {"version": "<version>", "share": <0 to 1>}}'
)
_Version = Annotated[str | None, Query(max_length=64)]


def add_routes(router: APIRouter, intake: Intake) -> None:
    """Add the routes by which versions of all models are loaded and unloaded, on all replicas."""
    replica = intake.replica

    async def load(request: Request, model: str, version: _Version = None) -> Response:
        """Load a version, or the newest of the store, here and on all replicas; it answers nobody yet.

        The reply comes once it is loaded here.
        """
        await _parameters(intake, request, ("version",))
        return json({"name": model, "version": await replica.load(model, version)})

    async def unload(request: Request, model: str, version: _Version = None, force: bool = False) -> Response:
        """Let go of a version, or of all that answer no clients, on all replicas; the reply comes once it is gone here.

        Its last requests are answered. One that answers clients stays, unless it is a canary and `force` is set.
        """
        await _parameters(intake, request, ("version", "force"))
        return json({"name": model, "versions": await replica.unload(model, version, force=force)})

    body: dict[str, Any] = {"body": json_of(RepositoryRequest), "body_required": False}
    path, tag = "/v2/repository/models/{model}", "inference protocol"
    add_route(router, "POST", f"{path}/load", load, "load_version", tag, json_of(LoadedVersion), **body)
    add_route(router, "POST", f"{path}/unload", unload, "unload_version", tag, json_of(UnloadedVersions), **body)


def add_of_model(router: APIRouter, intake: Intake) -> None:
    """Add the routes by which versions of a model are given clients."""
    replica, served = intake.replica, intake.served

    async def describe() -> Response:
        """Which versions answer which share of the clients, and what each replica has of them."""
        return json(_described(served, await replica.seen()))

    async def change(request: Request) -> Response:
        """Have clients answered by other versions, which all replicas must have loaded.

        Which clients a canary takes is a matter of their ids: a larger share adds some, and takes none away. A shadow
        answers nobody: it is shown a share of the batches, and counted is where it agrees.
        """
        context = RequestContext(intake, request, None, keyed=False)
        with context.admitted():
            wanted = await context.computed(partial(_read_assignment, await context.body(_LONGEST)))
        await replica.answer_by(served.name, wanted)
        return json(_described(served, await replica.seen()))

    add_route(router, "GET", "/rollout", describe, "describe_rollout", "service", json_of(Rollout))
    wanted = json_of(RolloutWanted)
    add_route(router, "PUT", "/rollout", change, "change_rollout", "service", json_of(Rollout), body=wanted)


async def _parameters(intake: Intake, request: Request, query: tuple[str, ...]) -> None:
    """Read the body of a request of the protocol, which may ask for nothing that is not here.

    Raises:
        Problem: `unsupported`, `invalid_request`.
    """
    context = RequestContext(intake, request, None, keyed=False, query=query)
    with context.admitted():
        body = await context.body(_LONGEST)
        document = await context.computed(partial(load_json, body)) if body else {}
    given = document.get("parameters", {}) if isinstance(document, dict) else None
    if not isinstance(document, dict) or document.keys() - {"parameters"} or not isinstance(given, dict):
        raise Problem(
            "invalid_request", 'the body must be empty, or an object with this member only: {"parameters": {}}'
        )
    if others := sorted(given.keys() - {"unload_dependents"}):
        raise Problem(
            "unsupported",
            f"the parameter {others[0][:40]!r} is not supported: a version is served as it was published; the version "
            "is named in the query, as in ?version=2",
        )


def _described(served: Served, seen: Seen) -> dict[str, Any]:
    noted = seen.rollouts.get(served.name, served.applied)
    reports = {name: report[served.name] for name, report in seen.replicas.items() if served.name in report}
    return {
        "model": served.name,
        "number": noted.number,
        "default": noted.default,
        "canary": {"version": noted.canary, "share": noted.share} if noted.canary else None,
        "shadow": {"version": noted.shadow, "share": noted.shadow_share} if noted.shadow else None,
        "previous": noted.previous or None,
        "versions": [_version(served, version, noted.share_of(version)) for version in noted.loaded],
        "replicas": [{"replica": name, **report} for name, report in sorted(reports.items())],
        "done": all(each["number"] == noted.number and not each["failed"] for each in reports.values()),
    }


def _version(served: Served, version: str, share: float) -> dict[str, Any]:
    service = served.versions.get(version)
    return {"version": version, "share": share, "clients_in_memory": len(service.sessions) if service else 0}


def _read_assignment(body: bytes) -> Assignment:
    """Who is to answer, and who is to be shown what was answered.

    Raises:
        PayloadError: as `load_json`.
        Problem: `invalid_request`.
    """
    document = load_json(body)
    found: Mapping[str, Any] = document if isinstance(document, dict) else {}
    if not isinstance(found.get("default"), str) or found.keys() - {"default", "canary", "shadow"}:
        raise Problem(
            "invalid_request", f"the body must be an object of these members: {_FORM}; the last two may be null"
        )
    canary, shadow = _read_part(found, "canary", "clients"), _read_part(found, "shadow", "batches")
    for name, (version, _) in (("canary", canary), ("shadow", shadow)):
        if version and version == found["default"]:
            raise Problem("invalid_request", f"version {version[:64]} is the default already, so it is no {name}")
    if shadow[0] and shadow[0] == canary[0]:
        raise Problem("invalid_request", f"version {shadow[0][:64]} is the canary, so it is no shadow")
    return Assignment(found["default"], *canary, *shadow)


def _read_part(found: Mapping[str, Any], name: str, of_what: str) -> tuple[str, float]:
    """A version and its share; an empty one where there is none."""
    part = found.get(name)
    if part is None:
        return "", 0.0
    whole = isinstance(part, dict) and part.keys() == {"version", "share"} and isinstance(part["version"], str)
    if not whole or not part["version"]:
        raise Problem("invalid_request", f"{name} is a version with its share of the {of_what}, or null: {_FORM}")
    if type(part["share"]) not in (int, float) or not 0 <= part["share"] <= 1:
        raise Problem("invalid_request", f"share of the {name} is that of the {of_what}, a number from 0 to 1")
    return part["version"], float(part["share"])
