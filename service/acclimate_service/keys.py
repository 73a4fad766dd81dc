"""API keys: who calls, for which tenant, and what they may do; from a file that may change meanwhile.

A key is `acclimate_<id>_<secret>`. Its id may be shown; its secret has 256 random bits, so the file holds a plain
SHA-256 of the whole key, which nobody who reads the file can undo. One line of the file is one key:

    # id       tenant  scopes        SHA-256 of the key
    5f1c09aa   acme    predict,read  9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

import argparse
import asyncio
import hmac
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias

SCOPES: Final = ("predict", "read", "write", "admin")
"""What keys may be good for; none of them implies another."""
ANYBODY: Final = "anybody"
"""What callers without a key may do too."""
ANY_KEY: Final = "any key"
"""What every key is good for."""
LOOK_S: Final = 1.0
"""Seconds between two looks at the file."""
_PREFIX: Final = "acclimate_"
_ID_BYTES: Final = 4
_SECRET_BYTES: Final = 32
_ID: Final = re.compile(r"[0-9a-f]{8}")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FORM: Final = "expected are an id, a tenant, scopes and a SHA-256, as `acclimate keys create` prints them"
Watch: TypeAlias = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Does work of a name that nobody waits for, and shows whether it fails."""


class KeysError(Exception):
    """The file of the keys cannot be read; the message says where, and holds nothing of what stands there."""


ERRORS: Final = (KeysError,)
"""What ends a command with its message alone."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is from.

    Args:
        tenant: whose clients are meant; empty for those of a service without keys.
        rights: scopes of the key, `ANY_KEY`, `ANYBODY`.
        key: id of the key; empty without one.
    """

    tenant: str
    rights: frozenset[str]
    key: str = ""


STRANGER: Final = Caller("", frozenset((ANYBODY,)))
"""Who brings no key where there are some."""
EVERYBODY: Final = Caller("", frozenset((*SCOPES, ANY_KEY, ANYBODY)))
"""Who calls a service without keys."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    caller: Caller


class Keys:
    """The keys of a file.

    Args:
        path: of the file, or of a link to it.

    Raises:
        KeysError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nobody = _Known(secrets.token_bytes(_SECRET_BYTES), STRANGER)
        self._seen: tuple[int, ...] = ()
        self._known: dict[str, _Known] = {}
        self.reload()

    def caller(self, key: str) -> Caller | None:
        """Who has this key; None if nobody has. It takes as long for an unknown id as for a wrong secret."""
        identity = key.removeprefix(_PREFIX).partition("_")[0]
        known = self._known.get(identity, self._nobody)
        right = hmac.compare_digest(sha256(key.encode()).digest(), known.digest)
        return known.caller if right else None

    def reload(self) -> None:
        """Read the file again if it is another one, or has changed.

        Raises:
            KeysError: it cannot be read; the keys stay what they were.
        """
        try:
            with self._path.open("rb") as file:
                told = os.fstat(file.fileno())
                seen = (told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)
                if seen == self._seen:
                    return
                lines = file.read().decode().splitlines()
        except (OSError, ValueError) as error:
            raise KeysError(f"the file of keys {self._path} cannot be read: {_reason(error)}") from None
        self._known = _parse(lines, self._path)
        self._seen = seen

    async def follow(self, watch: Watch) -> None:
        """Look for changes until cancelled; a file that cannot be read changes nothing, and shows as failing work."""

        async def look() -> None:
            await asyncio.to_thread(self.reload)

        while True:
            await asyncio.sleep(LOOK_S)
            await watch("keys", look)


def create(tenant: str, scopes: Sequence[str]) -> tuple[str, str]:
    """A new key, and its line for the file.

    Raises:
        KeysError: there is no such tenant or scope.
    """
    identity = secrets.token_hex(_ID_BYTES)
    key = f"{_PREFIX}{identity}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    line = f"{identity} {tenant} {','.join(scopes)} {sha256(key.encode()).hexdigest()}"
    _parse_line(line)
    return key, line


def run_create(options: argparse.Namespace) -> int:
    """Print a key, which is shown nowhere else, and its line for the file."""
    key, line = create(options.tenant, options.scope.split(","))
    print(f"key, shown this once:            {key}\nline for ACCLIMATE_KEYS_FILE:    {line}")
    return 0


def _parse(lines: Sequence[str], path: Path) -> dict[str, _Known]:
    found: dict[str, _Known] = {}
    for number, line in enumerate(lines, 1):
        if not line.split("#")[0].strip():
            continue
        try:
            known = _parse_line(line.split("#")[0])
            if known.caller.key in found:
                raise KeysError(f"the id {known.caller.key} is there twice")
        except KeysError as error:
            raise KeysError(f"{path}, line {number}: {error}") from None
        found[known.caller.key] = known
    return found


def _parse_line(line: str) -> _Known:
    """The key of a line; what stands there is not repeated where it could be a key itself."""
    words = line.split()
    if len(words) != 4 or not _ID.fullmatch(words[0]) or not _SHA256.fullmatch(words[3]):
        raise KeysError(_FORM)
    identity, tenant, scopes, digest = words
    if not _TENANT.fullmatch(tenant):
        raise KeysError("a tenant is 1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit")
    if not set(scopes.split(",")) <= set(SCOPES):
        raise KeysError(f"scopes are a comma list of {', '.join(SCOPES)}")
    rights = frozenset((*scopes.split(","), ANY_KEY, ANYBODY))
    return _Known(bytes.fromhex(digest), Caller(tenant, rights, identity))


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "it is no text in UTF-8"
