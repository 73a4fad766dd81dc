"""JSON to frozen records: a field is read from the member of its name, as its type says.

What is not as it should be raises KeyError, TypeError, ValueError or OverflowError.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from acclimate_client._problems import EXCERPT, committed
from acclimate_client.errors import Committed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
R = TypeVar("R", bound="DataclassInstance")
Json = Mapping[str, Any]


def record(kind: type[R], members: Json, **known: object) -> R:
    """Returns a record of this type; members without a field are ignored.

    Args:
        kind: Its fields without a default must have a member.
        members: Those of a JSON object.
        known: Fields that are no members as they stand.
    """
    for name, required, read in _fields(kind):
        if name not in known and (required or name in members):
            known[name] = read(members[name])
    return kind(**known)


def decoded(kind: Any, value: object) -> Any:
    """Returns a member as this type, which is one that fields of records have."""
    return _reader(kind)(value)


def typed(kind: type[T], value: object) -> T:
    """Returns the value if it is of this type."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, found {value!r}"[:EXCERPT])


@cache
def _fields(kind: "type[DataclassInstance]") -> list[tuple[str, bool, Callable[[Any], Any]]]:
    """The fields of a record: their names, whether they have no default, and what reads them."""
    types = get_type_hints(kind)
    return [
        (each.name, each.default is MISSING and each.default_factory is MISSING, _reader(types[each.name]))
        for each in fields(kind)
    ]


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What reads a member as this type."""
    if kind in _READERS:
        return _READERS[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return lambda value: record(kind, typed(dict, value))
    parts = get_args(kind)
    if NoneType in parts:
        some = _reader(parts[0])
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is tuple:
        item = _reader(parts[0])
        return lambda value: tuple(map(item, typed(list, value)))
    if get_origin(kind) is Mapping:
        named = _reader(parts[1])
        return lambda value: {name: named(each) for name, each in typed(dict, value).items()}
    return partial(typed, kind)


def _number(value: object) -> float:
    """A JSON number, which may be written without a point."""
    return float(value) if isinstance(value, int) else typed(float, value)


def _moment(value: object) -> datetime:
    """An ISO 8601 time with its offset as one in UTC."""
    time = datetime.fromisoformat(typed(str, value))
    if time.tzinfo is None:
        raise ValueError(f"expected a time with its offset from UTC, found {value!r}"[:EXCERPT])
    return time.astimezone(UTC)


def _bytes(value: object) -> bytes:
    """Bytes written as base64."""
    return b64decode(typed(str, value), validate=True)


_READERS: Mapping[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    Committed: committed,
    bytes: _bytes,
    datetime: _moment,
    float: _number,
}
