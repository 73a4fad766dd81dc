"""Hyper-parameters: fields that know their range, one check for all of them, and the JSON schema of an adapter."""

from collections.abc import Iterator
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Protocol

from acclimate_adapters.errors import ConfigurationError


class Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def real(default: float, *, low: float, high: float, doc: str) -> Any:
    """A real number within low..high, both included."""
    return field(default=default, metadata={"type": "number", "minimum": low, "maximum": high, "description": doc})


def integer(default: int, *, low: int, high: int, doc: str) -> Any:
    """A whole number within low..high, both included."""
    return field(default=default, metadata={"type": "integer", "minimum": low, "maximum": high, "description": doc})


def choice(default: str, *others: str, doc: str) -> Any:
    """One of a few words."""
    return field(default=default, metadata={"type": "string", "enum": [default, *others], "description": doc})


def names(*default: str, doc: str) -> Any:
    """A tuple of names, such as the modules to adapt."""
    metadata = {"type": "array", "items": {"type": "string"}, "description": doc}
    return field(default=tuple(default), metadata=metadata)


def check(record: Record) -> None:
    """Verify that every field of a dataclass of hyper-parameters is of its type and within its range.

    Raises:
        ConfigurationError: naming each field that is not, and what it accepts.
    """
    problems = [problem for f in fields(record) for problem in _problems(f, getattr(record, f.name))]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _problems(f: Field[Any], value: object) -> Iterator[str]:
    rule = f.metadata
    match rule["type"]:
        case "number" | "integer":
            wanted = (int,) if rule["type"] == "integer" else (int, float)
            sound = isinstance(value, wanted) and not isinstance(value, bool)
            if not (sound and rule["minimum"] <= value <= rule["maximum"]):  # NaN is within no range
                article = "an" if rule["type"] == "integer" else "a"
                yield f"{f.name}={value!r}: use {article} {rule['type']} from {rule['minimum']} to {rule['maximum']}"
        case "string":
            if value not in rule["enum"]:
                yield f"{f.name}={value!r}: use one of {', '.join(rule['enum'])}"
        case "array":
            if not (isinstance(value, tuple) and all(isinstance(name, str) for name in value)):
                yield f"{f.name}={value!r}: use a list of names"
            elif len(set(value)) < len(value):
                twice = next(name for number, name in enumerate(value) if name in value[:number])
                yield f"{f.name}: {twice!r} is there more than once; use a list of different names"


def schema(kind: type[Record]) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of an adapter's hyper-parameters."""
    properties = {
        f.name: {**f.metadata, "default": list(f.default) if isinstance(f.default, tuple) else f.default}
        for f in fields(kind)
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}
