"""`acclimate models load|unload|canary|shadow|promote|rollback|rollout`: versions of a running service come and go."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import orjson

from acclimate_service.remote import Refused, Remote, RemoteError
from acclimate_store import BundleError, BundleKey

ERRORS: Final = (RemoteError, BundleError)
"""What ends a command with its message alone."""
_LONGEST_WAIT_S: Final = 600
"""Until a version is loaded, and until all replicas have followed."""
_LOOK_S: Final = 0.5
_Part: TypeAlias = Mapping[str, Any] | None
"""A version and its share."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of a running service."""

    remote: Remote
    name: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> tuple["_Model", str | None]:
        """As the options of a command say; and the version that is meant."""
        key = BundleKey.parse(options.bundle)
        remote = replace(Remote.of(options.url, options.key_file), timeout_s=_LONGEST_WAIT_S)
        return cls(remote, key.name), key.version

    def look(self) -> Mapping[str, Any]:
        """What is rolled out."""
        return self.remote.document("GET", f"/models/{quote(self.name, safe='')}/rollout")

    def load(self, version: str | None) -> str:
        """Have a version loaded on all replicas; which one it is."""
        path = f"/v2/repository/models/{quote(self.name, safe='')}/load"
        loaded: str = self.remote.document("POST", path, version=version)["version"]
        self._wait(lambda replica: loaded in replica["loaded"] or replica["failed"].get(loaded))
        return loaded

    def answer_by(self, default: str, canary: _Part = None, shadow: _Part = None) -> None:
        """Have clients answered by these versions, and wait until they are everywhere."""
        wanted = {"default": default, "canary": canary, "shadow": shadow}
        path = f"/models/{quote(self.name, safe='')}/rollout"
        number = self.remote.put(path, wanted)["number"]
        self._wait(lambda replica: replica["number"] >= number)

    def _wait(self, followed: Callable[[Mapping[str, Any]], bool | str | None]) -> None:
        """Wait until every replica has followed; it says by a text that it cannot.

        Raises:
            RemoteError: a replica cannot, or takes too long.
        """
        until = time.monotonic() + _LONGEST_WAIT_S
        while True:
            replicas = self.look()["replicas"]
            said = {each["replica"]: followed(each) for each in replicas}
            failed = [f"{replica}: {reason}" for replica, reason in said.items() if isinstance(reason, str)]
            if failed:
                raise RemoteError(f"not on all replicas, so nothing else was changed: {'; '.join(failed)}")
            if all(said.values()):
                return
            if time.monotonic() > until:
                late = ", ".join(replica for replica, done in said.items() if not done)
                raise RemoteError(f"replicas have not followed within {_LONGEST_WAIT_S} s: {late}")
            time.sleep(_LOOK_S)


def run_load(options: argparse.Namespace) -> int:
    """Load a version on all replicas; it answers nobody yet."""
    model, version = _Model.of(options)
    return _refusable(lambda: print(f"{model.name}/{model.load(version)}: loaded on all replicas"))


def run_unload(options: argparse.Namespace) -> int:
    """Let go of a version on all replicas, or of all that answer nobody."""
    model, version = _Model.of(options)

    def unload() -> None:
        path, force = f"/v2/repository/models/{quote(model.name, safe='')}/unload", "true" if options.force else None
        reply = model.remote.document("POST", path, version=version, force=force)
        for each in reply["versions"]:
            print(f"{model.name}/{each}: unloaded")

    return _refusable(unload)


def run_canary(options: argparse.Namespace) -> int:
    """Have a share of the clients answered by a version, which is loaded first."""
    model, version = _Model.of(options)

    def canary() -> None:
        loaded = model.load(version)
        model.answer_by(model.look()["default"], {"version": loaded, "share": options.share})
        _show(model)

    return _refusable(canary)


def run_shadow(options: argparse.Namespace) -> int:
    """Show a version, which is loaded first, a share of the batches; with a share of 0 none is shown any more."""
    model, version = _Model.of(options)

    def shadow() -> None:
        now, loaded = model.look(), model.load(version) if options.share else None
        shown = {"version": loaded, "share": options.share} if loaded else None
        model.answer_by(now["default"], now["canary"], shown)
        _show(model)

    return _refusable(shadow)


def run_promote(options: argparse.Namespace) -> int:
    """Have all clients answered by a version: the one that is named, or the canary."""
    model, version = _Model.of(options)

    def promote() -> None:
        canary = model.look()["canary"]
        if version is None and canary is None:
            raise RemoteError(f"{model.name} has no canary; name a version: {model.name}/VERSION")
        model.answer_by(model.load(version or canary["version"]))
        _show(model)

    return _refusable(promote)


def run_rollback(options: argparse.Namespace) -> int:
    """End the canary; where there is none, go back to the default before."""
    model, _ = _Model.of(options)

    def roll_back() -> None:
        now = model.look()
        if now["canary"] is None and now["previous"] is None:
            raise RemoteError(f"{model.name} has no canary and no default before; nothing was changed")
        model.answer_by(now["default"] if now["canary"] else model.load(now["previous"]))
        _show(model)

    return _refusable(roll_back)


def run_rollout(options: argparse.Namespace) -> int:
    """Print which versions answer clients, and what each replica has."""
    model, _ = _Model.of(options)
    return _refusable(lambda: _show(model, as_json=options.json))


def _show(model: _Model, *, as_json: bool = False) -> None:
    now = model.look()
    if as_json:
        print(orjson.dumps(now).decode())
        return
    for each in now["versions"]:
        marks = {now["default"]: " (default)", now["previous"]: " (default before)"}
        marks |= {now["canary"]["version"]: " (canary)"} if now["canary"] else {}
        marks |= (
            {now["shadow"]["version"]: f" (shadow of {100 * now['shadow']['share']:g} % of the batches)"}
            if now["shadow"]
            else {}
        )
        share = f"answers {100 * each['share']:g} % of the clients"
        print(f"{model.name}/{each['version']}: {share}{marks.get(each['version'], '')}")
    for each in now["replicas"]:
        failed = "".join(f"; cannot load {version}: {reason}" for version, reason in each["failed"].items())
        behind = "" if each["number"] == now["number"] else "; follows yet"
        print(f"  {each['replica']}: has {', '.join(each['loaded'])}{failed}{behind}")


def _refusable(work: Callable[[], None]) -> int:
    """Do it; 1 if the service says no."""
    try:
        work()
    except Refused as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 1
    return 0
