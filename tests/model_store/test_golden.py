"""A version answers its golden batch as where it was published, or does not serve."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from acclimate_adapters import Pass
from acclimate_store import BundleKey, Catalogue, GoldenError, Manifest, TensorError, load_bundle
from acclimate_store.files import GOLDEN_FILE, MODEL_FILE
from acclimate_store.golden import check_golden
from acclimate_store.versions import publish, renewed

SHIPPED = Path(__file__).parents[2] / "model_store/bundles/fashion-cnn/1"


def golden(bundle_dir: Path) -> dict[str, Tensor]:
    return load_file(bundle_dir / GOLDEN_FILE)


def test_a_published_version_has_images_of_its_size_with_the_logits_of_its_network(bundle_dir: Path, net: Any) -> None:
    tensors, manifest = golden(bundle_dir), load_bundle(bundle_dir).manifest
    images = tensors["images"]
    assert (images.dtype, [*images.shape[1:]]) == (torch.uint8, [1, 28, 28])
    assert len({image.float().std().item() for image in images}) == len(images) > 1
    with torch.no_grad():
        expected = net(manifest.input.normalise(images))
    torch.testing.assert_close(tensors["logits"], expected, rtol=0, atol=1e-5)


def test_other_weights_of_the_same_name_are_refused_with_the_greatest_difference(
    bundle_dir: Path, edit_tensors: Callable[..., None]
) -> None:
    bias = load_file(bundle_dir / MODEL_FILE)["linear5.bias"]
    bias[1] += 2.5
    edit_tensors(MODEL_FILE, {"linear5.bias": bias})
    with pytest.raises(GoldenError, match=r"must not serve.* the greatest difference is 2\.5, .*'bee' for image"):
        load_bundle(bundle_dir)
    store = bundle_dir.parents[1]
    assert Catalogue(store).verify("tiny") != ()


@pytest.mark.parametrize(("share", "serves"), [(0.9, True), (1.1, False)])
def test_the_tolerance_is_a_share_of_the_largest_logit(
    share: float, serves: bool, bundle_dir: Path, edit_tensors: Callable[..., None]
) -> None:
    bundle, tensors = load_bundle(bundle_dir), golden(bundle_dir)
    assert bundle.manifest.golden is not None
    logits = tensors["logits"]
    off = share * bundle.manifest.golden.tolerance["float32"] * logits.abs().max()
    logits[-1, 0] += off if logits[-1, 0] < 0 else -off  # the largest one stays that
    edit_tensors(GOLDEN_FILE, {"logits": logits})
    if serves:
        load_bundle(bundle_dir)
    else:
        with pytest.raises(GoldenError, match=r"0\.005 of the largest logit"):
            load_bundle(bundle_dir)


def test_a_type_without_a_tolerance_has_to_answer_bit_for_bit(bundle_dir: Path) -> None:
    bundle = load_bundle(bundle_dir)
    told = bundle.manifest.model_dump(mode="json")
    told["golden"]["tolerance"] = {"float16": 0.5}
    strict = Manifest.from_json(json.dumps(told))
    check_golden(bundle_dir, strict, bundle.model)

    def slightly_off(x: Tensor) -> Pass:
        answer = bundle.model.frozen(x)
        return Pass(answer.features, answer.logits * 1.001)

    off = bundle.model.with_runtime(slightly_off)
    check_golden(bundle_dir, bundle.manifest, off)
    with pytest.raises(GoldenError, match="0 of the largest logit, 0, is accepted in float32"):
        check_golden(bundle_dir, strict, off)


def test_a_model_that_answers_with_nonsense_is_refused(bundle_dir: Path, edit_tensors: Callable[..., None]) -> None:
    edit_tensors(GOLDEN_FILE, {"logits": torch.full_like(golden(bundle_dir)["logits"], torch.nan)})
    with pytest.raises(GoldenError, match="the greatest difference is inf"):
        load_bundle(bundle_dir)


@pytest.mark.parametrize(
    "change", [{"images": None}, {"logits": torch.zeros(4, 2)}, {"images": torch.zeros(4, 1, 28, 28)}]
)
def test_a_batch_that_is_none_is_refused(
    change: dict[str, Any], bundle_dir: Path, edit_tensors: Callable[..., None]
) -> None:
    edit_tensors(GOLDEN_FILE, change)
    with pytest.raises(TensorError, match=r"golden\.safetensors of tiny/1 holds no images"):
        load_bundle(bundle_dir)


def test_a_version_without_one_serves_and_versions_made_from_it_have_one(tmp_path: Path) -> None:
    origin = BundleKey("fashion-cnn", "1")
    shutil.copytree(SHIPPED, tmp_path / str(origin))
    catalogue = Catalogue(tmp_path)
    old = catalogue.load(*origin)
    assert old.manifest.golden is None
    new = BundleKey("fashion-cnn", "2")
    publish(catalogue, origin, renewed(catalogue, old.manifest, new, "Again."), old.model.source, {})
    assert catalogue.load(*new).manifest.golden is not None
