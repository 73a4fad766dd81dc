"""Names of keys and makers of ids.

Every key of a client starts with `acc:{<tenant>/<client>}:`; the braces are the hash tag that keeps it on one node. The
tenant is the deployment's; a client that belongs to somebody is `<owner>/<name>` in it, which no plain id can be.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
_MODEL: Final = re.compile(r"[0-9a-f]{16}")
_RID_BYTES: Final = 16
MOST_KEPT: Final = 8
"""Earlier states of a client that can be kept."""
NO_SNAPSHOT: Final = "-"
"""Stands in a key for the id of a snapshot that does not exist."""


def new_id() -> str:
    """Random 64-bit id (16 hex digits): a life, a tag or a snapshot id."""
    return secrets.token_hex(8)


def random_rid() -> str:
    """Request id (32 hex digits) of a request that carries no idempotency key."""
    return secrets.token_hex(_RID_BYTES)


def fingerprint(secret: bytes, *parts: bytes | memoryview) -> str:
    """HMAC-SHA-256 of the parts of a request that decide its result, cut to 16 bytes (32 hex digits).

    Args:
        secret: deployment secret, the same on every replica.
        parts: decoded body and parameters, as bytes; each is hashed with its length, so that no two splits collide.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.hexdigest()[: 2 * _RID_BYTES]


def check_model(model: str) -> str:
    """The content hash of a frozen model, if it is one.

    Raises:
        ValueError: not 16 lower-case hex digits.
    """
    if not _MODEL.fullmatch(model):
        raise ValueError(
            f"model is {model!r}; accepted is the content hash of a frozen model: 16 lower-case hex digits"
        )
    return model


@dataclass(frozen=True)
class ClientScope:
    """One client of one tenant, and the names of all its keys, which are made once.

    Args:
        client: its name, or `<owner>/<name>`.
        tenant: of the deployment.

    Raises:
        ValueError: an id that does not start with a letter or digit, exceeds 128 characters or holds any other
            character than letters, digits, `.`, `_`, `~` and `-`.
    """

    client: str
    tenant: str = "default"

    def __post_init__(self) -> None:
        owned = (("owner", self.owner),) if "/" in self.client else ()
        for what, name in (("client", self.name), ("tenant", self.tenant), *owned):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{what} id is {name[:40]!r}, of {len(name)} characters; accepted are 1 to 128 letters, digits, "
                    "'.', '_', '~' and '-', the first one a letter or digit"
                )

    @cached_property
    def owner(self) -> str:
        """Whose client it is; empty if nobody's."""
        return self.client.rpartition("/")[0]

    @cached_property
    def name(self) -> str:
        """What its owner calls it."""
        return self.client.rpartition("/")[2]

    def rid(self, idempotency_key: str) -> str:
        """Request id of a keyed request: SHA-256(tenant, client, key) cut to 16 bytes (32 hex digits)."""
        return self._hash(idempotency_key).hex()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this client inside a stored state."""
        return self._hash("")

    def _hash(self, text: str) -> bytes:
        return hashlib.sha256("\0".join((self.tenant, self.client, text)).encode()).digest()[:_RID_BYTES]

    @cached_property
    def _prefix(self) -> str:
        return f"acc:{{{self.tenant}/{self.client}}}:"

    @cached_property
    def registry(self) -> str:
        """Hash: life of the client, its model scopes, bytes of stored answers."""
        return f"{self._prefix}r"

    @cached_property
    def markers(self) -> str:
        """Hash: request id -> marker."""
        return f"{self._prefix}i"

    @cached_property
    def marker_times(self) -> str:
        """Sorted set: request id -> milliseconds of its marker."""
        return f"{self._prefix}x"

    @cached_property
    def answers(self) -> str:
        """Hash: request id -> stored answer."""
        return f"{self._prefix}a"

    @cached_property
    def answer_times(self) -> str:
        """Sorted set: request id -> milliseconds of its answer."""
        return f"{self._prefix}y"

    @cached_property
    def requests(self) -> tuple[str, ...]:
        """The five above: whose client it is, and what is remembered of its requests."""
        return (self.registry, self.markers, self.marker_times, self.answers, self.answer_times)

    def head(self, model: str) -> str:
        """Hash: version, tag and inline state (or snapshot id) in one model scope."""
        return f"{self._prefix}{_checked(model)}:h"

    def journal(self, model: str) -> str:
        """Hash: the batches since the newest complete state."""
        return f"{self._prefix}{_checked(model)}:j"

    def lease(self, model: str) -> str:
        """String: fence of the replica that holds the journal open."""
        return f"{self._prefix}{_checked(model)}:l"

    def snapshot(self, model: str, sid: str) -> str:
        """Hash: chunk number -> chunk; an empty sid gives the name of a key that never exists."""
        return f"{self._prefix}{_checked(model)}:s:{sid or NO_SNAPSHOT}"

    def noted(self, model: str) -> tuple[str, str]:
        """Head, which says how far the timeline goes, and timeline."""
        scope = f"{self._prefix}{_checked(model)}"
        return f"{scope}:h", f"{scope}:t"

    def timeline(self, model: str) -> str:
        """List: what became of the client, the oldest first."""
        return self.noted(model)[1]

    def kept(self, model: str) -> tuple[str, ...]:
        """Hash: slot -> what earlier state is kept there; then, of each slot, hash: chunk number -> chunk."""
        index = f"{self._prefix}{_checked(model)}:k"
        return (index, *(f"{index}:{slot}" for slot in range(MOST_KEPT)))


_checked: Final = lru_cache(256)(check_model)
"""A process serves few models."""
