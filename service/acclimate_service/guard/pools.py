"""Evidence of all clients of one model, in Redis: what each client told of each configuration.

A share is told as a whole and replaces the one before, so that telling it again, or late, counts nothing twice. All
shares of a model are one key, from which the sums are made when they are read: they live and go together. The shares
of clients stand under hashes of their ids, keyed by the secret of the deployment: without it, nobody who knows an id
can find its share.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b, sha256
from typing import Final, Generic, Protocol, Self, TypeVar

from acclimate_service.guard.evidence import WEIGHT
from acclimate_service.state import ClientScope, ForeignValue, Limits, StoreUnavailable, Wire, check_model
from acclimate_service.state.redis.scripts import POOL_FORGET, POOL_RESET, POOL_TELL

MOST_CLIENTS: Final = 256
"""Clients of one configuration that count; 8,192 rows show a difference of about one point."""
MOST_CONFIGURATIONS: Final = 16
"""Configurations of one model; for a further one, that with the fewest clients goes."""
SEARCH_MS: Final = 10_000
"""Pause before places are looked for again where there are none; a search reads all shares."""
_TTL_FACTOR: Final = 4
"""Evidence outlives the clients it came from, for those that come after them."""
_HISTORY: Final = 4
"""Life, seq, born and when it was told, which stand before the numbers of a stored share."""


class Told(Protocol):
    """Rows that somebody labelled, as numbers of rows of each kind."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """How many there are of each."""
        ...

    @property
    def labelled(self) -> int:
        """All of them."""
        ...

    @classmethod
    def of_kinds(cls, kinds: Sequence[int]) -> Self:
        """Those of which there are so many of each."""
        ...


T = TypeVar("T", bound=Told)


@dataclass(frozen=True, slots=True)
class Share(Generic[T]):
    """One client's evidence.

    Args:
        life, seq: the point of its history that it stands for.
        born: tells evidence that began again, as after a reset, from more of the same.
        counts: of all rows since then.
    """

    life: str
    seq: int
    born: str
    counts: T


class Pools(Generic[T]):
    """The evidence about one model; all methods raise StateError where Redis fails.

    Args:
        of: what is told.
        wire: exchanges with Redis; whoever made it closes it.
        limits: lifetimes.
        model: content hash of the frozen model.
        tenant: whose clients.
        secret: of the deployment, the same on every replica; without one the names can be guessed from the ids.
    """

    def __init__(self, of: type[T], wire: Wire, limits: Limits, model: str, tenant: str, secret: str = "") -> None:
        self._read = lru_cache(MOST_CLIENTS * MOST_CONFIGURATIONS)(partial(_counted, of))  # most stay as they were
        self._of = of
        self._wire = wire
        self._ttl_ms = _TTL_FACTOR * limits.state_ttl_ms
        self._pool = f"acc:{{{tenant}/~{check_model(model)}}}:e"
        self._secret = sha256(secret.encode()).digest()

    async def tell(self, client: ClientScope, configuration: str, share: Share[T], over: str = "") -> bool:
        """Take a client's evidence in; what is older than what is known, or holds no label, changes nothing.

        Args:
            client, configuration: whose, and of what.
            share: all that it told.
            over: the life whose share it may take the place of, beside its own; empty if there was none.

        Returns:
            False if there is a share of another life, which is left as it is.
        """
        args = (
            self._name(client),
            _digest(configuration),
            configuration,
            share.life,
            share.seq,
            share.born,
            self._ttl_ms,
            WEIGHT,
            MOST_CLIENTS,
            MOST_CONFIGURATIONS,
            random.getrandbits(31),
            SEARCH_MS,
            over,
        )
        with self._readable():
            told = await self._wire.run(POOL_TELL, (self._pool,), args + share.counts.kinds)
        return bool(told.rows[1] != b"CHANGED")

    async def counted(self) -> Mapping[str, tuple[T, ...]]:
        """The rows of each client that count, by configuration."""
        with self._readable():
            flat: list[bytes] = await self._wire.read("HGETALL", self._pool)
        texts, found = dict[bytes, str](), defaultdict[bytes, list[T]](list)
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            digest, bar, _ = name.partition(b"|")
            if bar and (counts := self._read(value)).labelled:
                found[digest].append(counts)
            elif not bar and not digest.startswith(b"@"):
                texts[digest] = value.decode()
        return {texts[digest]: tuple(shares) for digest, shares in found.items()}

    async def share(self, client: ClientScope, configuration: str) -> Share[T] | None:
        """One client's evidence; None if it never told any."""
        field = f"{_digest(configuration)}|{self._name(client)}"
        with self._readable():
            found: bytes | None = await self._wire.read("HGET", self._pool, field)
        if found is None:
            return None
        life, seq, born, _, *numbers = found.decode().split("|")
        return Share(life, int(seq), born, self._of.of_kinds([*map(int, numbers[: len(numbers) // 2])]))

    async def forget(self, client: ClientScope, life: str = "") -> None:
        """Take one client's shares away, of every configuration: what it told in one life, or all."""
        with self._readable():
            await self._wire.run(POOL_FORGET, (self._pool,), (self._name(client), life))

    async def reset(self) -> None:
        """Let nothing count that was told so far, by any client."""
        with self._readable():
            await self._wire.run(POOL_RESET, (self._pool,), ())

    async def life(self, client: ClientScope) -> str:
        """The present life of a client; empty if there is no such client."""
        life, gone = await self._wire.read("HMGET", client.registry, "life", "gone")
        return "" if life is None or gone else life.decode()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Name the key where it has a value that is none of ours: no DELETE of a client would remove it."""
        try:
            yield
        except ForeignValue as error:
            raise StoreUnavailable(f"{error}: delete {self._pool}", error.committed) from error

    def _name(self, client: ClientScope) -> str:
        return blake2b(client.digest, digest_size=16, key=self._secret).hexdigest()


def _counted(of: type[T], share: bytes) -> T:
    """The rows of a stored share that count."""
    numbers = share.decode().split("|")[_HISTORY:]
    return of.of_kinds([*map(int, numbers[len(numbers) // 2 :])])


def _digest(configuration: str) -> str:
    return sha256(configuration.encode()).hexdigest()[:16]
