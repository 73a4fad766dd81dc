"""Keys and scopes of versions, and what of their clients is of use."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from acclimate_adapters import FrozenModel
from acclimate_service.compute.adapters import Configurations, canonical
from acclimate_service.compute.lineage import ModelLineage, Version, older_in_store, places
from acclimate_store import Catalogue
from acclimate_store.identity import PARTS, Identity

ATP, NONE, EM = canonical("atp", {}), canonical("none", {}), canonical("em", {})


def version(number: str, content: str, default: str = NONE, name: str = "m", **changes: Any) -> Version:
    parts = {part: changes.pop(part, "same") for part in PARTS}
    return Version(Identity(name, number, content * 16, parts, {"prior": "p", **changes}), default)


def served(*versions: Version, lacking: bool = False) -> ModelLineage:
    """The last of them is served, by a model that has rates unless it lacks them."""
    offers = frozenset({"prior", "gradients", *(() if lacking else ("rates",))})
    model: Any = SimpleNamespace(offers=offers)
    return ModelLineage(versions[-1].identity, places(versions), Configurations("none", {}), model)


def test_versions_of_one_identity_share_the_scope_of_the_oldest() -> None:
    found = places([version("1", "a"), version("2", "b", moments="x"), version("3", "c", weights="other")])
    assert [(each.key[0], each.scope[0]) for each in found] == [("a", "a"), ("b", "a"), ("c", "c")]


def test_what_comes_later_changes_no_key_and_no_scope() -> None:
    versions = [
        version("1", "a"),
        version("2", "a", classes="reversed"),
        version("3", "b"),
        version("4", "b", input="x"),
    ]
    for count in range(len(versions)):
        assert places(versions)[:count] == places(versions[:count])


def test_weights_that_mean_something_else_get_a_key_of_their_own() -> None:
    first, second = places([version("1", "a"), version("2", "a", classes="reversed")])
    assert first.key == first.scope == "a" * 16
    assert second.key == second.scope != first.key
    assert len(second.key) == 16
    int(second.key, 16)


@pytest.mark.parametrize(("configuration", "goes_on"), [(ATP, False), (NONE, True), (EM, True)])
def test_a_state_goes_on_where_its_adapter_reads_the_same(configuration: str, goes_on: bool) -> None:
    lineage = served(version("1", "a", rates="x"), version("2", "b", rates="y"))
    assert lineage.scope == "a" * 16
    assert lineage.key == lineage.version == "b" * 16
    assert served(version("1", "a")).version == "", "that of the scope"
    assert lineage.goes_on(configuration, "a" * 16) is lineage.goes_on(configuration, "") is goes_on
    assert lineage.goes_on(configuration, lineage.key)


@pytest.mark.parametrize("unknown", ["f" * 16, "c" * 16])
def test_nothing_goes_on_from_an_unknown_version_or_another_identity(unknown: str) -> None:
    lineage = served(version("1", "c", weights="other"), version("2", "a"))
    assert not lineage.goes_on(NONE, unknown)


def test_what_was_chosen_is_inherited_and_a_default_is_not() -> None:
    lineage = served(version("1", "a", ATP), version("2", "b", weights="other"))
    assert lineage.earlier == ("a" * 16,)
    assert lineage.inherited(ATP, "a" * 16, "") == lineage.inherited(ATP, "a" * 16, EM) == ""
    assert lineage.inherited(EM, "a" * 16, "") == EM


def test_what_was_chosen_is_inherited_though_it_is_the_default() -> None:
    lineage = served(version("1", "a", ATP), version("2", "b", weights="other"))
    assert lineage.inherited(ATP, "a" * 16, ATP) == ATP


def test_every_default_that_a_version_ever_had_was_not_chosen() -> None:
    lineage = served(version("1", "a", ATP), version("1", "a", EM), version("2", "b", weights="other"))
    assert lineage.inherited(ATP, "a" * 16, "") == lineage.inherited(EM, "a" * 16, "") == ""


def test_what_the_model_cannot_be_served_with_is_not_inherited() -> None:
    lineage = served(version("1", "a"), version("2", "b", weights="other"), lacking=True)
    assert lineage.inherited(ATP, "a" * 16, ATP) == ""
    gone = '{"adapter":"gone","hyperparameters":{}}'
    assert lineage.inherited(gone, "a" * 16, gone) == ""


def test_clients_are_looked_for_in_the_latest_scope_first_and_in_none_of_another_name() -> None:
    versions = [version(str(i), c, weights=c) for i, c in enumerate("abcd")]
    lineage = served(versions[0], versions[1], version("1", "e", name="n", weights="e"), versions[2], versions[3])
    assert [scope[0] for scope in lineage.earlier] == ["c", "b", "a"]
    assert lineage.others["e" * 16] == "n/1"
    assert lineage.beside().earlier == ()
    assert lineage.elsewhere({"a" * 16: 2, "d" * 16: 5, "e" * 16: 1, "f" * 16: 7}) == {"m/0": 2, "n/1": 1}


def test_the_oldest_version_with_the_same_quantities_is_found() -> None:
    lineage = served(
        version("1", "a", rates="x"), version("2", "b", rates="y"), version("3", "c", rates="y", moments="m")
    )
    assert lineage.oldest_like({"rates", "gradients"})[0] == "b"
    assert lineage.oldest_like({"prior"})[0] == "a"
    assert lineage.oldest_like({"moments"})[0] == "c"


def test_a_version_is_read_back_as_it_was_noted() -> None:
    one = version("1", "a", ATP)
    assert Version.from_json(one.to_json().encode()) == one


def test_a_model_under_another_hash_makes_other_states_and_is_else_the_same(frozen: FrozenModel) -> None:
    other = frozen.with_hash("0" * 16)
    assert Configurations("none", {}).adapter("").init(other).model == "0" * 16
    assert frozen.content_hash != other.content_hash
    assert other.modules == frozen.modules


@pytest.fixture
def frozen(bundles: Path) -> FrozenModel:
    return Catalogue(bundles).load("fashion-cnn").model


@pytest.fixture
def bundles() -> Path:
    return Path(__file__).parents[3] / "model_store" / "bundles"


@pytest.fixture
def copies(tmp_path: Path, bundles: Path) -> Callable[..., Catalogue]:
    def make(*versions: str) -> Catalogue:
        source = bundles / "fashion-cnn" / "1"
        for number in versions:
            folder = tmp_path / "fashion-cnn" / number
            folder.mkdir(parents=True)
            for file in source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            text = (source / "manifest.json").read_text().replace('"version": "1"', f'"version": "{number}"')
            (folder / "manifest.json").write_text(text)
        return Catalogue(tmp_path)

    return make


def test_older_versions_of_the_store_are_noted_once(copies: Callable[..., Catalogue]) -> None:
    catalogue = copies("1", "2", "3", "10")
    (catalogue.root / "fashion-cnn" / "2" / "source.safetensors").unlink()  # one that cannot be read is left out
    third = version("3", "a", name="fashion-cnn")
    first = older_in_store(catalogue, third.identity, ())
    assert [(each.identity.version, each.default) for each in first] == [("1", ATP)]
    assert older_in_store(catalogue, third.identity, places(first)) == []
