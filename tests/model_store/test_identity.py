"""What makes a version another model to its clients' states, and what `models compare` says of it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acclimate_adapters import Source
from acclimate_store import BundleError, BundleKey, Catalogue, InputSpec, Manifest, write_bundle
from acclimate_store.compare import compare
from acclimate_store.identity import PARTS, Identity, identity_of, read_identity
from acclimate_store.shallow_cnn import ShallowCNN

Publish = Callable[..., BundleKey]


@pytest.fixture
def publish(store: Path, manifest: Manifest, net: ShallowCNN, source: Source) -> Publish:
    """Publish a next version of `tiny`, some of which is other."""

    def publish(version: str, weights: ShallowCNN = net, quantities: Source = source, **changes: Any) -> BundleKey:
        changed = manifest.model_copy(update={"version": version, **changes})
        write_bundle(store, changed, weights, quantities)
        return BundleKey("tiny", version)

    return publish


@pytest.fixture
def identity(store: Path) -> Callable[[str], Identity]:
    catalogue = Catalogue(store)
    return lambda version: read_identity(store / "tiny" / version, catalogue.manifest("tiny", version))


@pytest.fixture
def comparison(store: Path) -> Callable[[BundleKey], str]:
    return lambda new: "\n".join(compare(Catalogue(store), BundleKey("tiny", "1"), new))


def other_weights(net: ShallowCNN) -> ShallowCNN:
    changed = ShallowCNN(num_classes=3)
    changed.load_state_dict(net.state_dict())
    torch.nn.init.constant_(changed.conv1.weight, 0.25)
    return changed.eval()


SPEC = InputSpec(channels=1, height=28, width=28, mean=(0.3,), std=(0.4,))
OTHER: Mapping[str, Mapping[str, Any]] = {
    "classes": {"classes": ("cat", "bee", "ant")},
    "input": {"input": SPEC.model_copy(update={"mean": (0.5,)})},
    "architecture": {"architecture": "acclimate_store.shallow_cnn:ShallowCNN"},
}


def test_what_is_read_from_the_files_is_what_the_loaded_model_says(store: Path, identity: Any) -> None:
    bundle = Catalogue(store).load("tiny")
    assert identity("1") == identity_of(bundle.manifest, bundle.model.content_hash, bundle.model.source)


def test_an_identity_is_read_back_as_it_was_written(identity: Any) -> None:
    assert Identity.from_json(identity("1").to_json()) == identity("1")
    assert identity("1").parts.keys() == {*PARTS}


@pytest.mark.parametrize("part", [part for part in OTHER if part != "architecture"])
def test_whatever_decides_an_answer_is_part_of_the_identity(part: str, publish: Publish, identity: Any) -> None:
    publish("2", **OTHER[part])
    assert identity("1").content == identity("2").content  # which is why the content hash is not enough
    assert identity("1").differing(identity("2")) == (part,)
    assert identity("1").digest != identity("2").digest


def test_an_architecture_that_must_be_trusted_is_another_one(store: Path, identity: Any, edit_manifest: Any) -> None:
    before = identity("1")
    edit_manifest(**OTHER["architecture"])
    assert before.differing(identity("1")) == ("architecture",)


def test_other_weights_are_another_model(publish: Publish, net: ShallowCNN, identity: Any) -> None:
    publish("2", other_weights(net))
    assert identity("1").differing(identity("2")) == ("weights",)


@pytest.mark.parametrize("quantity", ["rates", "confusion", "prototypes", "descriptor", "anchors", "moments"])
def test_quantities_are_no_part_of_the_identity_and_differ_one_by_one(
    quantity: str, publish: Publish, source: Source, identity: Any
) -> None:
    publish("2", quantities=replace(source, **{quantity: {} if quantity == "moments" else None}))
    was, now = identity("1"), identity("2")
    assert was.digest == now.digest
    assert was.content != now.content
    assert was.changed(now, was.quantities) == (quantity,)


def test_a_quantity_of_the_same_name_with_other_numbers_differs(
    publish: Publish, source: Source, identity: Any
) -> None:
    publish("2", quantities=replace(source, rates={"conv1.weight": 0.2, "bn1.running_mean": -1 / 3}))
    assert identity("1").changed(identity("2"), {"rates", "moments", "gradients"}) == ("rates",)


def test_compare_says_that_added_moments_reset_none_but_those_who_read_them(
    publish: Publish, source: Source, store: Path
) -> None:
    bare, full = publish("2", quantities=replace(source, moments={})), publish("3")
    first, kept, anew, _ = compare(Catalogue(store), bare, full)
    assert first == "tiny/2 -> tiny/3: the same model; quantities that differ: moments"
    assert anew == "  begin anew:       clients with balanced (moments), consensus (moments)"
    assert {"atp", "bbse", "fedthe", "none"} <= {name.strip(" ,") for name in kept.partition("with")[2].split()}


def test_compare_says_which_adapter_is_served_no_more(publish: Publish, source: Source, comparison: Any) -> None:
    text = comparison(publish("2", quantities=replace(source, rates=None)))
    assert "atp (tiny/2 has no rates: the default adapter takes its place)" in text


def test_compare_says_that_nothing_differs(publish: Publish, comparison: Any) -> None:
    text = comparison(publish("2"))
    assert "the same model; quantities that differ: none" in text
    assert "begin anew" not in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (OTHER["classes"], "the classes are in another order (0 was ant, is cat; 2 was cat, is ant)".replace(";", ",")),
        ({"classes": ("ant", "bee", "dog")}, "other classes (gone: cat; new: dog)"),
        (OTHER["input"], "other input (mean was (0.3,), is (0.5,))"),
    ],
)
def test_compare_says_why_every_client_begins_anew(
    changes: Mapping[str, Any], reason: str, publish: Publish, comparison: Any
) -> None:
    text = comparison(publish("2", **changes))
    assert text.startswith(f"tiny/1 -> tiny/2: another model: {reason}")
    assert "every client begins anew, under the adapter that was chosen for it" in text


def test_compare_names_weights(publish: Publish, net: ShallowCNN, comparison: Any) -> None:
    assert "another model: other weights" in comparison(publish("2", other_weights(net)))


def test_a_damaged_version_cannot_be_compared(store: Path, publish: Publish, comparison: Any) -> None:
    new = publish("2")
    (store / "tiny" / "2" / "source.safetensors").unlink()
    with pytest.raises(BundleError, match=r"source\.safetensors is missing"):
        comparison(new)
    shutil.rmtree(store / "tiny" / "2")
    with pytest.raises(BundleError, match="there is no tiny/2"):
        comparison(new)
