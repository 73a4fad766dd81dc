"""`acclimate clients`: list, show, export and delete the clients of a running service, one or all of them."""

import argparse
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import orjson

from acclimate_service.remote import Refused, Remote, RemoteError

ERRORS: Final = (RemoteError,)
"""What ends a command with its message alone."""
_PAGE: Final = 500
_STATES: Final = 100
"""On a page, which is read again where it broke off."""
_COLUMNS: Final = f"{'client':<32}{'adapter':<20}{'adaptation':<12}{'version':>9}{'bytes':>10}  {'changed':<22}verdict"

Done: TypeAlias = tuple[Mapping[str, Any], str]
"""What is told of a client, and why it was not done; empty where it was."""


def run_list(options: argparse.Namespace) -> int:
    """Print the clients, as they are found."""
    remote = Remote.of(options.url, options.key_file)
    rows = _listed(remote, options)
    if options.json:
        for row in rows:
            print(orjson.dumps(row).decode())
        return 0
    first = [*islice(rows, 1)]  # before anything is printed: the service may refuse
    print(_COLUMNS)
    for row in chain(first, rows):
        print(
            f"{row['client_id']:<31} {row['adapter']:<19} {row['adaptation']:<12}{row['version']:>9}{row['bytes']:>10}"
            f"  {row['changed_at'] or '-':<22}{row['verdict'] or '-'}"
        )
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print all about one client."""
    remote = Remote.of(options.url, options.key_file)
    try:
        document = remote.document("GET", _path(options, options.client))
    except Refused as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(orjson.dumps(document).decode())
    else:
        print("\n".join(f"{name:<24}{value}" for name, value in _flat(document)))
    return 0


def run_export(options: argparse.Namespace) -> int:
    """Write the states of clients into a folder, each whole or not at all."""
    _check_choice(options)
    remote = Remote.of(options.url, options.key_file)
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RemoteError(f"{options.to} cannot be made: {error}") from error

    def save(client: str, state: bytes) -> Done:
        file = options.to / f"{client}.safetensors"
        beside = file.with_suffix(".part")
        try:
            beside.write_bytes(state)
            beside.rename(file)
        except OSError as error:
            raise RemoteError(f"{file} cannot be written: {error}") from error
        return {"client_id": client, "file": str(file), "bytes": len(state)}, ""

    def every() -> Iterator[Done]:
        cursor, over = options.cursor, False
        while not over:
            end: Mapping[str, Any] = {}
            try:
                lines = remote.lines(f"{_model(options)}/states", limit=_STATES, cursor=cursor, **_filters(options))
                for line in lines:
                    if "state" in line:
                        yield save(line["client_id"], b64decode(line["state"]))
                    elif "code" in line:
                        yield line, line["detail"]
                    else:
                        end = line
                if not end:
                    raise RemoteError("the service broke off")
            except RemoteError as error:
                further = f"; to go on there, add --cursor {cursor}" if cursor else ""
                raise RemoteError(f"{error}{further}") from error
            cursor, over = end["next"], end["next"] is None

    def named(client: str) -> Done:
        return save(client, remote.ask("GET", f"{_path(options, client)}/state"))

    return _tell(options, every() if options.all else _each(options.client, named), "exported")


def run_delete(options: argparse.Namespace) -> int:
    """Remove clients and all that was learned for them."""
    _check_choice(options)
    remote = Remote.of(options.url, options.key_file)

    def every() -> Iterator[Done]:
        cursor, over = None, False
        while not over:
            page = remote.document(
                "DELETE", _path(options), limit=_PAGE, cursor=cursor, all="true", **_filters(options)
            )
            yield from (({"client_id": client}, "") for client in page["deleted"])
            yield from ((client, client["detail"]) for client in page["failed"])
            cursor, over = page["next"], page["next"] is None

    def named(client: str) -> Done:
        remote.ask("DELETE", _path(options, client))
        return {"client_id": client}, ""

    if options.all and not options.yes:
        _ask(remote, options)
    return _tell(options, every() if options.all else _each(options.client, named), "deleted")


def _ask(remote: Remote, options: argparse.Namespace) -> None:
    """Whether all that fit are meant, of whoever can be asked."""
    if not sys.stdin.isatty():
        raise RemoteError("--all would delete every client that fits, for good; say --yes if that is meant")
    number = sum(1 for _ in _listed(remote, options))
    what = f"delete {number} client{'' if number == 1 else 's'} of {remote.url}"
    if input(f"{what}, for good? [y/N] ").strip().lower() not in ("y", "yes"):
        raise RemoteError("nothing was deleted")


def _check_choice(options: argparse.Namespace) -> None:
    if bool(options.client) == options.all:
        raise RemoteError("name clients, or say --all")


def _each(clients: Iterable[str], work: Callable[[str], Done]) -> Iterator[Done]:
    for client in clients:
        try:
            yield work(client)
        except Refused as error:
            yield {"client_id": client}, str(error)


def _tell(options: argparse.Namespace, outcomes: Iterator[Done], word: str) -> int:
    """Say what became of clients: of those for whom it was not done, why not."""
    done = refused = 0
    for told, failure in outcomes:
        if failure:
            refused += 1
            print(f"acclimate: {told['client_id']}: {failure}", file=sys.stderr)
        else:
            done += 1
            if options.json:
                print(orjson.dumps({**told, word: True}).decode(), flush=True)
    if not options.json:
        print(f"acclimate: {done} client{'' if done == 1 else 's'} {word}")
    return 1 if refused else 0


def _listed(remote: Remote, options: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    """Every client that fits, once, though one may be on two pages."""
    seen, cursor = set[str](), None
    while True:
        page = remote.document("GET", _path(options), limit=_PAGE, cursor=cursor, **_filters(options))
        for row in page["clients"]:
            if row["client_id"] not in seen:
                seen.add(row["client_id"])
                yield row
        cursor = page["next"]
        if cursor is None:
            return


def _filters(options: argparse.Namespace) -> dict[str, str | None]:
    return {"adapter": options.adapter, "active_since": options.active_since, "verdict": options.verdict}


def _model(options: argparse.Namespace) -> str:
    return f"/models/{quote(options.model, safe='')}" if options.model else ""


def _path(options: argparse.Namespace, client: str = "") -> str:
    return f"{_model(options)}/clients" + (f"/{quote(client, safe='')}" if client else "")


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if not isinstance(value, Sequence | Mapping) or value else "-"
