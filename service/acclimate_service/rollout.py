"""Which version of a model answers which client: noted in Redis, so that all replicas agree and no restart forgets it.

Every replica looks about once a second, and says what it has loaded. A version is given clients only once all replicas
that were heard of lately have it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from acclimate_service.errors import Problem
from acclimate_service.state import ClientScope, StoreUnavailable, Wire
from acclimate_service.state.redis.scripts import ROLLOUT_CHANGE, ROLLOUT_LOOK

LOOK_S: Final = 1.0
"""Between two looks of a replica."""
LONGEST_SILENCE_S: Final = 10.0
"""After which a replica is no longer waited for."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is to be served of a model.

    Args:
        default: version of all clients that no canary takes.
        loaded: all versions that are to be in memory, the default among them.
        canary: version that answers a share of the clients; empty for none.
        share: of the clients, in 0..1, that the canary answers.
        shadow: version that is shown batches of clients and answers nobody; empty for none.
        shadow_share: of the batches, in 0..1, that the shadow is shown.
        previous: the default before; empty if there was none.
        number: of changes so far.
    """

    default: str
    loaded: tuple[str, ...]
    canary: str = ""
    share: float = 0.0
    shadow: str = ""
    shadow_share: float = 0.0
    previous: str = ""
    number: int = 0

    @property
    def needed(self) -> frozenset[str]:
        """Versions that answer clients."""
        return frozenset((self.default, self.canary) if self.canary else (self.default,))

    def share_of(self, version: str) -> float:
        """Share of the clients that a version answers."""
        taken = self.share if self.canary else 0.0
        return taken if version == self.canary else 1 - taken if version == self.default else 0.0

    def with_loaded(self, version: str) -> "Rollout":
        """The same with one more version in memory; replicas that could not load it try again."""
        return self._changed(loaded=tuple(dict.fromkeys((*self.loaded, version))))

    def without(self, version: str) -> "Rollout":
        """The same without a version, which is no default; a canary or a shadow ends with it."""
        kept: dict[str, Any] = {"canary": "", "share": 0.0} if version == self.canary else {}
        kept |= {"shadow": "", "shadow_share": 0.0} if version == self.shadow else {}
        previous = "" if version == self.previous else self.previous
        return self._changed(loaded=tuple(each for each in self.loaded if each != version), previous=previous, **kept)

    def assigned(self, wanted: "Assignment") -> "Rollout":
        """The same with other versions for the clients."""
        previous = self.previous if wanted.default == self.default else self.default
        return self._changed(previous=previous, **asdict(wanted))

    def _changed(self, **members: Any) -> "Rollout":
        return replace(self, number=self.number + 1, **members)

    def to_json(self) -> str:
        """One text for one rollout, which `from_json` reads back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> "Rollout":
        """What `to_json` wrote; raises ValueError, TypeError or KeyError for anything else."""
        told = json.loads(text)
        return cls(**{**told, "loaded": tuple(told["loaded"])})


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which versions are to answer clients, and which is to be their shadow; members as those of `Rollout`."""

    default: str
    canary: str = ""
    share: float = 0.0
    shadow: str = ""
    shadow_share: float = 0.0


def place_of(client: ClientScope, version: str) -> float:
    """Where a client stands in 0..1 when a version is rolled out: at that share its turn comes, and it never leaves.

    The order is another one for each version, so that it is not always the same clients that go first.
    """
    digest = hashlib.sha256(f"{version}\0{client.tenant}\0{client.client}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True, slots=True)
class Seen:
    """What is noted: rollouts by model, and by replica and model what it has: `loaded`, `failed`, `number`."""

    rollouts: Mapping[str, Rollout]
    replicas: Mapping[str, Mapping[str, Any]]

    def require_everywhere(self, model: str, version: str) -> None:
        """Refuse a version that some replica does not have.

        Raises:
            Problem: `version_not_loaded`, which says who lacks it and why.
        """
        for replica, reports in self.replicas.items():
            report = reports.get(model)
            if report is not None and version not in report["loaded"]:
                reason = report["failed"].get(version)
                why = f"it could not load it: {reason}" if reason else "it is loading it, or has not heard of it yet"
                detail = f"{model}/{version} is not on replica {replica} yet, so no client may need it: {why}"
                raise Problem("version_not_loaded", detail)


class Rollouts:
    """The rollouts of all models of a deployment.

    Args:
        wire: exchanges with Redis.
        tenant: of the deployment.
        replica: that looks, and reports; no other one has this name.
    """

    def __init__(self, wire: Wire, tenant: str, replica: str) -> None:
        self._wire = wire
        self._replica = replica
        self.key = f"acc:{{{tenant}/~models}}:r"
        self._reports = f"acc:{{{tenant}/~models}}:p"

    async def look(self, report: Mapping[str, Any]) -> Seen:
        """What is noted, once this was.

        Args:
            report: what this replica has, by model.

        Raises:
            StateError: Redis failed, or has something else under the keys.
        """
        text = json.dumps(report, sort_keys=True)
        args = (self._replica, text, int(1000 * LONGEST_SILENCE_S))
        _, rollouts, replicas = (await self._wire.run(ROLLOUT_LOOK, (self.key, self._reports), args)).rows
        try:
            return Seen(
                {name.decode(): Rollout.from_json(each) for name, each in _pairs(rollouts)},
                {name.decode(): json.loads(each) for name, each in _pairs(replicas)},
            )
        except (ValueError, TypeError, KeyError) as error:
            raise StoreUnavailable(f"the rollouts noted under {self.key} cannot be read: {error!r}") from error

    async def change(self, model: str, before: Rollout | None, after: Rollout) -> bool:
        """Replace the rollout of a model; False if it is not `before` any more. Raises StateError."""
        args = (model, before.to_json() if before else "", after.to_json())
        reply = await self._wire.run(ROLLOUT_CHANGE, (self.key,), args)
        return bool(reply.rows[0] == b"OK")

    async def leave(self) -> None:
        """Be waited for no longer; raises StateError."""
        args = (self._replica, "", int(1000 * LONGEST_SILENCE_S))
        await self._wire.run(ROLLOUT_LOOK, (self.key, self._reports), args)


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
