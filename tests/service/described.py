"""Holds replies against the description of the interface, so that the two cannot drift apart."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import TypeAdapter

from acclimate_service.http import schemas

_REFERENCE = "#/components/schemas/"
_LARGE = 2**20


class Described:
    """The interface as the first service describes it that is asked; all have the same."""

    def __init__(self) -> None:
        self._paths: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]] = ()

    def check(self, reply: httpx.Response) -> None:
        """Fail on a reply that is not as described: by status, content type and members."""
        operation = self._operation(reply.request)
        if operation is None:
            return
        name, responses = operation["operationId"], operation["responses"]
        described = responses.get(str(reply.status_code), responses["default"])
        reply.read()
        kind = reply.headers.get("content-type", "").partition(";")[0]
        contents = described.get("content", {})
        assert (kind in contents) is bool(contents), f"{name} replied {reply.status_code} as {kind or 'nothing'}"
        if kind.endswith("json") and len(reply.content) <= _LARGE and reply.request.method != "HEAD":
            _adapter(contents[kind]["schema"]).validate_json(reply.content, strict=True)

    def _operation(self, request: httpx.Request) -> Mapping[str, Any] | None:
        method = "get" if request.method == "HEAD" else request.method.lower()
        for pattern, operations in self._paths or self._read(request.url):
            if pattern.fullmatch(request.url.path):
                return operations.get(method)
        return None

    def _read(self, url: httpx.URL) -> Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]:
        paths = httpx.get(url.join("/openapi.json"), timeout=30).json()["paths"]
        fixed_first = sorted(paths.items(), key=lambda each: each[0].count("{"))
        self._paths = [(re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), each) for path, each in fixed_first]
        return self._paths


DESCRIBED = Described()
_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


def _adapter(schema: Mapping[str, Any]) -> TypeAdapter[Any]:
    made = _ADAPTERS.get(str(schema))
    if made is None:
        _ADAPTERS[str(schema)] = made = TypeAdapter(_type(schema))
    return made


def _type(schema: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return getattr(schemas, schema["$ref"].removeprefix(_REFERENCE))
    if "items" in schema:
        return list[_type(schema["items"])]  # type: ignore[misc]
    return dict[str, Any]
