"""What becomes of the states of clients when one version of a model takes the place of another."""

from collections.abc import Iterator

from acclimate_adapters import ADAPTERS, Adapter, create
from acclimate_adapters.adapter import indispensable
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.identity import Identity, read_identity
from acclimate_store.manifest import Manifest

_MOST_CLASSES = 5  # of which a difference is spelt out


def compare(catalogue: Catalogue, old: BundleKey, new: BundleKey) -> tuple[str, ...]:
    """Lines that say which adapters' clients go on, and why the others begin anew.

    Raises:
        BundleError: a version is not there, or a file of it is malformed.
    """
    (before, was), (after, now) = (_read(catalogue, key) for key in (old, new))
    head = f"{before.key} -> {after.key}:"
    if was.differing(now):
        reasons = "; ".join(_difference(part, before, after) for part in was.differing(now))
        return (
            f"{head} another model: {reasons}",
            "  every client begins anew, under the adapter that was chosen for it",
        )
    names = was.quantities.keys() | now.quantities.keys()
    changed = ", ".join(was.changed(now, names)) or "none"
    return (f"{head} the same model; quantities that differ: {changed}", *_fates(was, now))


def _read(catalogue: Catalogue, key: BundleKey) -> tuple[Manifest, Identity]:
    key = catalogue.resolve(*key)
    manifest = catalogue.manifest(*key)
    return manifest, read_identity(catalogue.directory(key), manifest)


def _fates(was: Identity, now: Identity) -> Iterator[str]:
    reasons = {name: _reason(was, now, create(name)) for name in sorted(ADAPTERS)}
    kept = [name for name, reason in reasons.items() if not reason]
    yield f"  keep their state: clients with {', '.join(kept)}"
    anew = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    if anew:
        yield f"  begin anew:       clients with {', '.join(anew)}"
    yield "  A chain keeps its state where both of its parts do. Adapters are meant with their defaults."


def _reason(was: Identity, now: Identity, adapter: Adapter) -> str:
    """Why clients of an adapter begin anew; empty if they do not."""
    gone = sorted(indispensable(adapter) & was.quantities.keys() - now.quantities.keys())
    if gone:
        return f"{now.bundle} has no {', '.join(gone)}: the default adapter takes its place"
    return ", ".join(was.changed(now, adapter.needs))


def _difference(part: str, before: Manifest, after: Manifest) -> str:
    match part:
        case "classes" if sorted(before.classes) == sorted(after.classes):
            pairs = zip(before.classes, after.classes, strict=True)
            moved = [f"{i} was {a}, is {b}" for i, (a, b) in enumerate(pairs) if a != b]
            more = ", ..." if len(moved) > _MOST_CLASSES else ""
            return f"the classes are in another order ({', '.join(moved[:_MOST_CLASSES])}{more})"
        case "classes":
            gone, new = ({*before.classes} - {*after.classes}, {*after.classes} - {*before.classes})
            return f"other classes (gone: {_list(gone)}; new: {_list(new)})"
        case "input":
            a, b = before.input.model_dump(), after.input.model_dump()
            return (
                f"other input ({', '.join(f'{name} was {a[name]}, is {b[name]}' for name in a if a[name] != b[name])})"
            )
        case "architecture" if before.architecture != after.architecture:
            return f"other architecture (was {before.architecture}, is {after.architecture})"
        case "architecture":
            return "other options of the architecture"
        case "classifier":
            return f"other classifier (was {before.classifier or 'none'}, is {after.classifier or 'none'})"
    return f"other {part}"


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
