"""`acclimate clients`: list, show, export and delete the clients of a running service, one or all of them."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final
from urllib.parse import quote

import orjson

from acclimate_service.remote import Refused, Remote, RemoteError

ERRORS: Final = (RemoteError,)
"""What ends a command with its message alone."""
_PAGE: Final = 500
_COLUMNS: Final = f"{'client':<32}{'adapter':<20}{'adaptation':<12}{'version':>9}{'bytes':>10}  {'changed':<22}verdict"


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
        document = remote.get(_path(options, options.client))
    except Refused as error:
        return _refused(error)
    if options.json:
        print(orjson.dumps(document).decode())
    else:
        print("\n".join(f"{name:<24}{value}" for name, value in _flat(document)))
    return 0


def run_export(options: argparse.Namespace) -> int:
    """Write the states of clients into a folder, each whole or not at all."""
    remote = Remote.of(options.url, options.key_file)
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RemoteError(f"{options.to} cannot be made: {error}") from error

    def export(client: str) -> Mapping[str, Any]:
        state, file = remote.ask("GET", f"{_path(options, client)}/state"), options.to / f"{client}.safetensors"
        beside = file.with_suffix(".part")
        try:
            beside.write_bytes(state)
            beside.rename(file)
        except OSError as error:
            raise RemoteError(f"{file} cannot be written: {error}") from error
        return {"client_id": client, "file": str(file), "bytes": len(state)}

    return _each(remote, options, export, "exported")


def run_delete(options: argparse.Namespace) -> int:
    """Remove clients and all that was learned for them."""
    if options.all and not options.yes:
        raise RemoteError("--all would delete every client that fits, for good; say --yes if that is meant")
    remote = Remote.of(options.url, options.key_file)

    def delete(client: str) -> Mapping[str, Any]:
        remote.ask("DELETE", _path(options, client))
        return {"client_id": client}

    return _each(remote, options, delete, "deleted")


def _each(remote: Remote, options: argparse.Namespace, work: Callable[[str], Mapping[str, Any]], word: str) -> int:
    """Do something with every client that is meant; those that the service refuses are said, and the others done."""
    if bool(options.client) == options.all:
        raise RemoteError("name clients, or say --all")
    done = refused = 0
    for client in options.client or (row["client_id"] for row in _listed(remote, options)):
        try:
            told = work(client)
        except Refused as error:
            refused += 1
            _refused(error, f"{client}: ")
            continue
        done += 1
        if options.json:
            print(orjson.dumps({**told, word: True}).decode(), flush=True)
    if not options.json:
        print(f"acclimate: {done} client{'' if done == 1 else 's'} {word}")
    return 1 if refused else 0


def _listed(remote: Remote, options: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    """Every client that fits, once, though one may be on two pages."""
    seen, cursor = set[str](), None
    filters = {"adapter": options.adapter, "active_since": options.active_since, "verdict": options.verdict}
    while True:
        page = remote.get(_path(options), limit=_PAGE, cursor=cursor, **filters)
        for row in page["clients"]:
            if row["client_id"] not in seen:
                seen.add(row["client_id"])
                yield row
        cursor = page["next"]
        if cursor is None:
            return


def _path(options: argparse.Namespace, client: str = "") -> str:
    model = f"/models/{quote(options.model, safe='')}" if options.model else ""
    return f"{model}/clients" + (f"/{quote(client, safe='')}" if client else "")


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if not isinstance(value, Sequence | Mapping) or value else "-"


def _refused(error: Refused, what: str = "") -> int:
    print(f"acclimate: {what}{error}", file=sys.stderr)
    return 1
