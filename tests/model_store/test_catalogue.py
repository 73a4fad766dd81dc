import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_store import BundleKey, BundleNotFound, Catalogue, IntegrityError, Manifest, ManifestError
from acclimate_store.catalogue import age


@pytest.fixture
def catalogue(tmp_path: Path, manifest: Manifest) -> Catalogue:
    """Folders with manifests only: enough to find and to order."""
    for key in ("b/1", "a/9", "a/10", "a/1", "a/1.10", "a/1.9"):
        name, version = key.split("/")
        folder = tmp_path / key
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest.model_copy(update={"name": name, "version": version}).to_json())
    return Catalogue(tmp_path)


def test_bundles_are_listed_by_name_and_natural_version(catalogue: Catalogue) -> None:
    assert [str(key) for key in catalogue.list()] == ["a/1", "a/1.9", "a/1.10", "a/9", "a/10", "b/1"]


def test_version_10_is_newer_than_9(catalogue: Catalogue) -> None:
    assert catalogue.manifest("a").version == "10"
    assert catalogue.manifest("a", "9").version == "9"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("9", "10"),
        ("1.9", "1.10"),
        ("v2", "v10"),
        ("2.0rc1", "2.0"),
        ("2.0.dev3", "2.0a1"),
        ("1.0", "1.0.post1"),
        ("2024.9", "2024.10"),
        ("01", "1"),
    ],
)
def test_versions_are_ordered_by_pep_440(older: str, newer: str) -> None:
    assert age(older) < age(newer)


def test_what_is_no_version_is_older_than_all_that_are_and_ordered_by_its_numbers() -> None:
    names = ["1", "spring", "best-10", "0.1.dev1", "best-2"]
    assert sorted(names, key=age) == ["best-2", "best-10", "spring", "0.1.dev1", "1"]


@pytest.mark.parametrize("folder", [".1-abc", "with space"])
def test_half_written_and_foreign_folders_are_no_bundles(folder: str, catalogue: Catalogue) -> None:
    shutil.copytree(catalogue.root / "b" / "1", catalogue.root / "b" / folder)
    (catalogue.root / "b" / "empty").mkdir()
    assert [key.version for key in catalogue.list() if key.name == "b"] == ["1"]


@pytest.mark.parametrize(("name", "version"), [("c", None), ("a", "11"), ("..", None)])
def test_what_is_not_there_is_answered_with_what_is(name: str, version: str | None, catalogue: Catalogue) -> None:
    with pytest.raises(BundleNotFound, match=r"it holds a/1, a/1\.9, a/1\.10, a/9, a/10, b/1"):
        catalogue.manifest(name, version)


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFound, match=r"there is no model store at .*/absent"):
        Catalogue(tmp_path / "absent").list()


def test_an_empty_store_holds_nothing(tmp_path: Path) -> None:
    assert Catalogue(tmp_path).list() == ()
    with pytest.raises(BundleNotFound, match="it holds nothing"):
        Catalogue(tmp_path).load("a")


def test_a_moved_bundle_is_not_taken_for_another(catalogue: Catalogue) -> None:
    (catalogue.root / "a" / "9").rename(catalogue.root / "a" / "11")
    with pytest.raises(ManifestError, match="in folder a/11 is that of a/9"):
        catalogue.load("a", "11")
    assert len(catalogue.verify("a", "11")) == 1


@pytest.mark.parametrize(("text", "key"), [("fashion-cnn", ("fashion-cnn", None)), ("a.b/1.0", ("a.b", "1.0"))])
def test_a_key_is_parsed_and_printed(text: str, key: tuple[str, str | None]) -> None:
    assert BundleKey.parse(text) == key
    assert str(BundleKey.parse(text)) == text


@pytest.mark.parametrize("text", ["", "/", "a/", "/1", "a/b/c", "../a", "a/..", "a b/1", ".a"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(BundleNotFound, match="write name or name/version"):
        BundleKey.parse(text)


def test_the_newest_version_is_loaded(store: Path) -> None:
    bundle = Catalogue(store).load("tiny")
    assert bundle.manifest.key == "tiny/1"
    assert Catalogue(store).verify("tiny") == ()


def test_a_damaged_bundle_is_reported_and_not_loaded(store: Path, bundle_dir: Path) -> None:
    (bundle_dir / "source.json").write_text("{}")
    (bundle_dir / "surplus").touch()
    problems = Catalogue(store).verify("tiny", "1")
    assert "source.json differs from its sha256 in manifest.json" in problems
    assert "surplus is not listed in manifest.json" in problems
    with pytest.raises(IntegrityError):
        Catalogue(store).load("tiny", "1")


def test_a_broken_manifest_is_a_problem_and_no_crash(store: Path, edit_manifest: Callable[..., None]) -> None:
    edit_manifest(classes=["one"])
    assert any("classes" in problem for problem in Catalogue(store).verify("tiny"))
