"""Which versions of models there were, and what of their clients' states is of use under the one that is served.

Redis keeps a list of them for each tenant, which only grows: from it, every replica finds the same keys and scopes.

- The key of a version is the content hash of its frozen model, or, where that is the key of a version that means
  something else by its answers (other classes, another input), a hash of both. States are stamped with it.
- All versions of one identity share a model scope, the key of the oldest of them.
- Evidence of the fleet stays with the version that it is about.
"""

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace

from acclimate_adapters import ConfigurationError, FrozenModel, State, require
from acclimate_service.compute.adapters import Configurations, canonical
from acclimate_service.state import StoreUnavailable, Wire
from acclimate_service.state.redis.scripts import NOTE_VERSIONS
from acclimate_store import BundleError, BundleKey, Catalogue
from acclimate_store.identity import Identity, read_identity

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model, and what clients began with under it."""

    identity: Identity
    default: str

    def to_json(self) -> str:
        """One text for one version with one default."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> "Version":
        """What `to_json` wrote."""
        told = json.loads(text)
        return cls(Identity(**told["identity"]), told["default"])


@dataclass(frozen=True, slots=True)
class Place:
    """Where the states of a version are, and the key that they are stamped with."""

    version: Version
    key: str
    scope: str

    @property
    def in_heads(self) -> str:
        """The key, as the heads of states have it: empty if it is the scope."""
        return "" if self.key == self.scope else self.key


async def known_versions(wire: Wire, tenant: str, *more: Version) -> tuple[Place, ...]:
    """All versions that were ever noted for a tenant, the oldest first, once these have been added.

    Raises:
        StateError: Redis failed, or has something else under the key.
    """
    key = f"acc:{{{tenant}/~models}}:v"
    reply = await wire.run(NOTE_VERSIONS, (key,), [version.to_json() for version in more])
    try:
        return places([Version.from_json(text) for text in reply.rows[1:]])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreUnavailable(f"the versions noted under {key} cannot be read: {error!r}") from error


def places(versions: Sequence[Version]) -> tuple[Place, ...]:
    """Keys and scopes of versions, which those that come after them do not change."""
    owners, scopes, found = dict[str, str](), dict[str, str](), list[Place]()
    for version in versions:
        identity, digest = version.identity, version.identity.digest
        key = identity.content
        if owners.setdefault(key, digest) != digest:
            key = hashlib.sha256(f"{key}\0{digest}".encode()).hexdigest()[: len(key)]
        found.append(Place(version, key, scopes.setdefault(digest, key)))
    return tuple(found)


def older_in_store(catalogue: Catalogue, served: Identity, known: Collection[Place]) -> list[Version]:
    """Versions of the same name that are older than the one served, and were not noted yet; the oldest first."""
    noted = {place.version.identity.bundle for place in known}
    versions = [key for key in catalogue.list() if key.name == served.name]
    older = versions[: versions.index(BundleKey(served.name, served.version))]
    found = []
    for key in older:
        if str(key) not in noted:
            try:
                default = catalogue.default(*key)
                identity = read_identity(catalogue.directory(key), catalogue.manifest(*key))
                found.append(Version(identity, canonical(default.adapter, default.options)))
            except (BundleError, ConfigurationError) as error:
                _log.warning("states of %s are not looked for: %s", key, error)
    return found


class ModelLineage:
    """The versions of the model that is served.

    Attributes:
        key: that states are stamped with.
        scope: where they are.
        version: the key, as the heads of states have it: empty if it is the scope.
        earlier: other scopes in which clients may have been served before, the latest first.

    Args:
        served: its identity.
        known: all versions, itself among them.
        configurations: adapters of its clients.
        model: the frozen model.
    """

    def __init__(
        self, served: Identity, known: Sequence[Place], configurations: Configurations, model: FrozenModel
    ) -> None:
        self._known = known
        self._configurations = configurations
        self._model = model
        own = next(place for place in known if place.version.identity == served)
        self._served, self.key, self.scope = served, own.key, own.scope
        self.version = own.in_heads
        self._identities = {place.key: place.version.identity for place in known if place.scope == own.scope}
        scopes = [place.scope for place in known if place.version.identity.name == served.name]
        self.earlier: tuple[str, ...] = tuple(dict.fromkeys(scope for scope in reversed(scopes) if scope != own.scope))
        self._defaults: dict[str, set[str]] = defaultdict(set)
        for place in known:
            self._defaults[place.scope].add(place.version.default)

    @property
    def others(self) -> dict[str, str]:
        """Scopes of other models, with the bundles that have their states there: the first, and to which later ones."""
        found: dict[str, list[str]] = defaultdict(list)
        for place in self._known:
            if place.scope != self.scope:
                found[place.scope].append(place.version.identity.bundle)
        return {s: b[0] if b[0] == b[-1] else f"{b[0]} to {b[-1]}" for s, b in found.items()}

    def elsewhere(self, clients: Mapping[str, int]) -> dict[str, int]:
        """How many clients have states of other models, by the bundles that these are.

        Args:
            clients: that have a state in each scope.
        """
        found = Counter[str]()
        for scope, bundle in self.others.items():
            found[bundle] += clients.get(scope, 0)
        return {bundle: number for bundle, number in sorted(found.items()) if number}

    @property
    def siblings(self) -> tuple[str, ...]:
        """Keys of the other versions of this identity, the latest first: from their states clients may go on."""
        return tuple(key for key in reversed(self._identities) if key != self.key)

    def beside(self) -> "ModelLineage":
        """The same for states beside those of the clients: their configuration is nobody's choice."""
        other = copy(self)
        other.earlier = ()
        return other

    def oldest_like(self, needs: Collection[str]) -> str:
        """Key of the oldest version of this identity that has the same of these quantities."""
        return next(key for key, each in self._identities.items() if not self._served.changed(each, needs))

    def goes_on(self, config: str, version: str) -> bool:
        """Whether the quantities that the adapter reads are the same in both versions."""
        key = version or self.scope
        if key == self.key:
            return True
        identity = self._identities.get(key)
        if identity is None:
            return False
        try:
            return not self._served.changed(identity, self._configurations.adapter(config).needs)
        except ConfigurationError:  # the step says that this version of the service does not know it
            return True

    def adopted(self, state: State, config: str) -> State:
        """The state as one of the version that is served, if it is of use there."""
        if state.model == self.key or not self.goes_on(config, state.model):
            return state
        return replace(state, model=self.key)

    def inherited(self, config: str, scope: str, chosen: str) -> str:
        """The same if it was chosen, and if the model can be served with it; else that of new clients.

        A client that has the default of its version, and for which nobody chose that, goes on with that of the new one:
        what has proven its worth there need not do so here.
        """
        try:
            require(self._configurations.adapter(config), self._model)
        except ConfigurationError:
            return ""
        return "" if config in self._defaults[scope] and config != chosen else config
