import json
from collections.abc import Callable
from typing import Any

import pytest

from acclimate_store import Manifest, ManifestError

HASH = "0" * 64


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.pop(key)


def with_(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update(changes)


def with_input(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["input"].update(changes)


def without_input(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["input"].pop(key)


RESIZE = {"size": 28, "interpolation": "bilinear", "antialias": True, "crop": None}

REFUSED = {
    "an unknown field": (with_(colour="red"), "colour: Extra inputs"),
    "an unknown field of the input": (with_input(dtype="uint8"), "input.dtype: Extra inputs"),
    "another schema": (with_(schema_version=2), "schema_version"),
    "no schema": (without("schema_version"), "schema_version: Field required"),
    "one class": (with_(classes=["ant"]), "classes: Tuple should have at least 2"),
    "a class twice": (with_(classes=["ant", "bee", "ant"]), "repeated: ant"),
    "an unnamed class": (with_(classes=["ant", ""]), "classes.1"),
    "no mean": (without_input("mean"), "input.mean: Field required"),
    "no std": (without_input("std"), "input.std: Field required"),
    "a std of 0": (with_input(std=[0.0]), "input.std.0: Input should be greater than 0"),
    "a mean per nobody's channel": (with_input(mean=[0.1, 0.2]), "mean needs one value per channel (1), not 2"),
    "an infinite mean": (with_input(mean=[float("inf")]), "input.mean.0: Input should be a finite number"),
    "a metric that is no number": (with_(metrics={"accuracy": float("nan")}), "metrics.accuracy"),
    "a NaN option": (with_(architecture_options={"depth": float("nan")}), "architecture_options"),
    "a path upwards": (with_(files={"../model.safetensors": HASH}), "no '..'"),
    "a hidden path upwards": (with_(files={"notes/../../x": HASH}), "no '..'"),
    "an absolute path": (with_(files={"/etc/passwd": HASH}), "no leading '/'"),
    "a path with a backslash": (with_(files={"..\\x": HASH}), "plain relative path"),
    "its own hash": (with_(files={"manifest.json": HASH}), "cannot list its own hash"),
    "a hash of another kind": (with_(files={"model.safetensors": "abc"}), "files.model.safetensors"),
    "a name with a slash": (with_(name="a/b"), "name: Value error"),
    "a name that is a folder upwards": (with_(name=".."), "name: Value error"),
    "an empty version": (with_(version=""), "version: Value error"),
    "a number as version": (with_(version=1), "version: Input should be a valid string"),
    "a size in quotes": (with_input(height="28"), "input.height: Input should be a valid integer"),
    "an architecture without family": (with_(architecture="resnet18"), "architecture: String should match"),
    "no licence": (with_(licence=""), "licence"),
    "no provenance": (without("provenance"), "provenance: Field required"),
    "a resize without antialias": (
        with_input(resize={"size": 28, "interpolation": "bilinear"}),
        "input.resize.antialias: Field required",
    ),
    "an unknown interpolation": (with_input(resize=RESIZE | {"interpolation": "lanczos"}), "'bilinear' or 'bicubic'"),
    "a crop beyond the image": (with_input(resize=RESIZE | {"crop": 32}), "must not be larger than size"),
    "a resize to another size": (with_input(resize=RESIZE | {"size": 32}), "resize yields 32x32"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_manifest_is_refused_for(change: Callable[[dict[str, Any]], None], message: str, manifest: Manifest) -> None:
    raw = json.loads(manifest.to_json())
    change(raw)
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(json.dumps(raw))
    assert message in str(caught.value)


def test_all_problems_of_a_manifest_are_named_at_once() -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json('{"schema_version": 1, "name": "a/b"}')
    problems = "\n".join(caught.value.problems)
    assert all(field in problems for field in ("name:", "version:", "input:", "classes:", "licence:"))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_what_is_no_json_object_is_a_manifest_error(text: bytes) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json is not valid"):
        Manifest.from_json(text)


def test_a_manifest_survives_its_json(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_manifest_cannot_be_changed(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="frozen"):
        manifest.name = "other"
