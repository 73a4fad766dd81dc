"""`acclimate learn`, `evaluate` and `models import-atp`: from labelled images to a default adapter that is earned."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acclimate_learning.clients import Pool
from acclimate_learning.commands import authors_order
from acclimate_service.cli import main
from acclimate_store import Bundle, Catalogue

pytestmark = pytest.mark.integration

SMALL = ("--teachers", "3", "--judges", "5", "--teacher-images", "20", "--judge-images", "20", "--no-onnx")


def learn(*words: object) -> int:
    return main(["learn", "fashion-cnn/1", *SMALL, "--tune", "fedthe", *map(str, words)])


def test_learning_publishes_rates_with_what_they_gain(
    store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate_learning.budgets.FEWEST_ROWS", 40)  # as many as the tuning clients have
    assert learn("--data", data(), "--rounds", 2, "--lr", 0.01, "--shift", "label") == 0
    out = capsys.readouterr().out
    assert "learned in 2 rounds with a learning rate of 0.01; best after" in out
    assert "atp on 5 held-out clients:" in out
    manifest = Catalogue(store).manifest("fashion-cnn")
    assert manifest.version == "2"
    assert manifest.evidence is not None
    assert manifest.evidence.of == "5 simulated clients of data.npz, shift label, seed 0"
    default = manifest.default(servable=True)
    assert default.adapter == ("consensus" if manifest.evidence.obstacle else "atp")
    assert f"fashion-cnn/2: published, {default}" in out
    old, new = (Catalogue(store).load("fashion-cnn", version).model.source for version in ("1", "2"))
    assert new.rates != old.rates
    assert torch.equal(new.confusion_matrix("soft"), old.confusion_matrix("soft"))
    assert (store / "fashion-cnn/1/model.safetensors").samefile(store / "fashion-cnn/2/model.safetensors")
    settings = manifest.settings["fedthe"]
    assert f"fedthe: {json.dumps(settings.options)} is best for 2 tuning clients that enrol" in out
    assert settings.of.startswith("5 simulated clients of data.npz, shift label, seed 0, enrolled")
    assert settings.clients == 5
    stored = manifest.state_budgets["atp"]
    assert stored.of == "2 simulated clients of data.npz, shift label, seed 0"
    assert f"atp states may be stored in {stored.nbytes / 1e3:,.1f} kB, a budget of" in out


def test_the_same_seed_gives_the_same_bundle(store: Path, data: Callable[..., Path]) -> None:
    words = ("--data", data(), "--rounds", 2, "--lr", 0.01, "--shift", "label")
    assert learn(*words, "--as", "first") == learn(*words, "--as", "second") == 0
    first, second = (Catalogue(store).load("fashion-cnn", version).model for version in ("first", "second"))
    assert first.content_hash == second.content_hash


def test_rates_that_gain_nothing_for_certain_do_not_become_the_default(
    store: Path, data: Callable[..., Path], pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels that are wrong teach rates that harm, and judge them to be so by right ones."""
    wrong = data()
    np.savez(wrong, images=pool.images, labels=np.random.default_rng(0).permutation(pool.labels))
    assert learn("--data", wrong, "--rounds", 2, "--lr", 0.01) == 0
    said = "default adapter: consensus, because: no_labels; it hardly harms anybody, and of atp its gain of"
    assert said in capsys.readouterr().out
    main(["models", "show", "fashion-cnn"])
    assert said in capsys.readouterr().err


def test_real_clients_are_taken_from_a_column(
    store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn("--data", data(), "--by", "owners", "--rounds", 1, "--lr", 0.01) == 0
    assert "held-out clients" in capsys.readouterr().out
    assert Catalogue(store).manifest("fashion-cnn").evidence.of.endswith("clients of data.npz")  # type: ignore[union-attr]


def test_images_of_the_target_side_choose_the_corruptions(
    store: Path, data: Callable[..., Path], pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "field").mkdir()
    for number, image in enumerate(pool.images[:25]):
        Image.fromarray(image[0]).save(tmp_path / f"field/{number}.png")
    words = ("--like", tmp_path / "field", "--shift", "feature", "--rounds", 1, "--lr", 0.01)
    assert learn("--data", data(), *words) == 0
    out = capsys.readouterr().out
    for role in ("teach", "tune", "judge"):
        assert f"like field: clients that {role} have " in out
    told = Catalogue(store).manifest("fashion-cnn").evidence
    assert told is not None
    assert told.of == "5 simulated clients of data.npz, shift feature, like field, seed 0"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--rounds", 1, "--lr", 1e30), "give --lr"),
        (("--partition", "even"), "use step, dirichlet:0.3 or pathological:2"),
        (("--as", "1"), "fashion-cnn/1 is published already"),
        (("--tune", "em"), "--tune: there is nothing to choose for em; write some of fedthe,surgical,dynfed, or none"),
        (("--by", "nobody"), "array nobody is missing"),
        (("--judge-images", 1000, "--shift", "label"), "give more data, or smaller clients"),
    ],
)
def test_what_cannot_be_learned_is_said_and_nothing_is_published(
    words: tuple[object, ...], reason: str, store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn("--data", data(), *words) == 2
    assert reason in capsys.readouterr().err
    assert [path.name for path in (store / "fashion-cnn").iterdir()] == ["1"]


def test_evaluating_says_what_to_choose_and_writes_it(
    store: Path, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "all.json"), "--picture", str(tmp_path / "gains.svg"))
    names = "atp,bn_adapt,em,atp+em"
    words = ("evaluate", "fashion-cnn", "--clients", str(data()), "--by", "owners", "--adapters", names, "--write")
    assert main([*words, *files]) == 0
    out = capsys.readouterr().out
    told = {each["adapter"]: each for each in json.loads((tmp_path / "all.json").read_text())["adapters"]}
    assert set(told) == set(names.split(","))
    recorded = {"atp": 81.1, "bn_adapt": 75.5, "em": None, "atp+em": None}  # README's table, on these very clients
    for name, accuracy in recorded.items():
        if accuracy is not None:
            assert 100 * np.mean(told[name]["accuracy"]) == pytest.approx(accuracy, abs=0.2)
        assert f"{name:<18}" in out
    assert 100 * np.mean(told["atp"]["frozen"]) == pytest.approx(76.4, abs=0.2)
    earned = [n for n, e in told.items() if e["low"] > 0 and e["harmed"] <= 0.05]
    best = max(earned, key=lambda name: told[name]["gain"], default="none")
    assert f"recommended: {best}" in out
    manifest = Catalogue(store).manifest("fashion-cnn")
    assert (manifest.version, manifest.default(servable=False).adapter) == ("2", best)
    assert (tmp_path / "gains.svg").read_text().count("<rect") == 1 + len(told)
    old, new = (Catalogue(store).load("fashion-cnn", version, runtime="auto") for version in ("1", "2"))
    assert old.model.content_hash == new.model.content_hash  # clients keep their states
    assert old.runtime == new.runtime


def test_streams_are_replayed_with_the_labels_that_are_asked_for(
    store: Path, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "fashion-cnn", "--clients", str(data()), "--by", "owners", "--adapters", "bn_adapt,tent")
    shares = (0, 0.01, 0.05)
    assert main([*words, "--asked", *map(str, shares), "--json", str(tmp_path / "all.json")]) == 0
    out, figures = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    alone = {each["adapter"]: each for each in figures["adapters"]}
    asked = {(each["adapter"], each["share"]): each for each in figures["asked"]}
    assert asked.keys() == {(name, share) for name in ("portfolio", "bn_adapt", "tent") for share in shares}
    for (name, share), each in asked.items():
        assert each["spent"] <= share + 1e-9 + (share > 0) / 200  # a client may be ahead by one row of 200
        assert each["gain"] == pytest.approx(np.mean(each["accuracy"]) - np.mean(alone["tent"]["frozen"]))
        if name in alone and not share:  # nobody told anything: the adapter answers
            assert each["accuracy"] == alone[name]["accuracy"]
    assert asked["portfolio", 0.05]["gain"] > max(asked["portfolio", 0]["gain"], 0)
    harmed = asked["tent", 0.05], asked["tent", 0]
    assert (harmed[0]["gain"], harmed[0]["harmed"]) > (harmed[1]["gain"] + 0.02, 0)
    assert harmed[0]["harmed"] < harmed[1]["harmed"]
    best = np.max([alone["tent"]["frozen"], *(each["accuracy"] for each in alone.values())], axis=0)
    assert figures["oracle"]["accuracy"] == best.tolist()
    assert figures["portfolio"]["state_bytes"] > 300_000  # rates and gradients of the arm atp
    line = next(line for line in out.splitlines() if line.startswith("   5 %") and " portfolio " in line)
    assert f"{100 * asked['portfolio', 0.05]['gain']:+.1f}" in line
    assert "bn_adapt, guarded" in out


def test_labels_are_asked_for_by_the_guard_which_needs_what_the_service_needs(
    store: Path, data: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("replay", "record"):
        monkeypatch.delitem(sys.modules, f"acclimate_service.guard.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "orjson", None)
    words = ("evaluate", "fashion-cnn", "--clients", str(data()), "--by", "owners", "--adapters", "em")
    assert main([*words, "--asked", "0.01"]) == 2
    assert '--asked needs orjson; pip install "acclimate[serve]"' in capsys.readouterr().err


@pytest.mark.parametrize("share", ["-0.1", "1.1", "nan", "5%"])
def test_budgets_are_shares(share: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "fashion-cnn", "--data", "there.npz", "--asked", share])
    assert "use a share of the rows from 0 to 1, such as 0.01" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--picture", "--report"])
def test_places_that_cannot_be_written_are_refused_before_any_work(
    option: str, store: Path, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path / "nowhere/file", tmp_path):
        assert main(["evaluate", "fashion-cnn", "--clients", str(data()), option, str(place)]) == 2
        said = capsys.readouterr()
        assert f"{option} {place}: give a file in a folder that is there" in said.err
        assert not said.out


def test_an_evaluation_in_which_nothing_gains_is_kept_as_evidence_against_the_safest_adapter(
    store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels that are wrong agree with no adapter."""
    file = data()
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, "labels": np.random.default_rng(0).permutation(arrays["labels"])})
    words = ("evaluate", "fashion-cnn", "--clients", str(file), "--by", "owners", "--write")
    assert main([*words, "--adapters", "bn_adapt,consensus"]) == 0
    out = capsys.readouterr().out
    assert "recommended: none" in out
    assert "published, default adapter: none, because: evidence; of consensus its gain of" in out
    assert Catalogue(store).load("fashion-cnn").default().adapter == "none"


def test_the_best_of_an_evaluation_in_which_nothing_gains_is_the_reason_that_is_given(
    store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "fashion-cnn/1", "--clients", str(data()), "--by", "owners", "--write")
    assert main([*words, "--adapters", "tent,none"]) == 0
    assert "because: no_labels; it hardly harms anybody, and of none its gain of +0.0 points" in capsys.readouterr().out


def test_hyper_parameters_are_chosen_by_tuning_clients_and_used_by_evaluate(
    store: Path, data: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn("--data", data(), "--rounds", 1, "--lr", 0.01, "--tune", "surgical,dynfed") == 0
    out = capsys.readouterr().out
    chosen = dict(re.findall(r"(surgical|dynfed): (\{.*\}) is best for 2 tuning clients;", out))
    manifest = Catalogue(store).manifest("fashion-cnn")
    assert manifest.options == {name: json.loads(options) for name, options in chosen.items()}
    assert manifest.options.keys() == {"surgical", "dynfed"}
    assert manifest.settings["dynfed"].of == "5 simulated clients of data.npz, shift mixed, seed 0"
    words = ("evaluate", "fashion-cnn", "--data", str(data()), *SMALL, "--adapters", "em,surgical")
    assert main([*words, "--json", str(tmp_path / "all.json")]) == 0
    told = {each["adapter"]: each["options"] for each in json.loads((tmp_path / "all.json").read_text())["adapters"]}
    assert told == {"em": {}, "surgical": manifest.options["surgical"]}
    assert learn("--data", data(), "--rounds", 1, "--lr", 0.01, "--tune", "none", "--as", "alone") == 0
    assert Catalogue(store).manifest("fashion-cnn", "alone").settings == {}


def test_clients_may_be_folders(store: Path, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = Catalogue(store).manifest("fashion-cnn").classes
    kept = [label for label in range(10) if "/" not in classes[label]]
    assert pool.owners is not None
    for client in sorted(set(pool.owners.tolist()))[:2]:
        rows = [r for r in np.flatnonzero(pool.owners == client) if pool.labels[r] in kept][:30]
        for row in rows:
            folder = tmp_path / "clients" / client / classes[pool.labels[row]]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pool.images[row, 0]).save(folder / f"{row}.png")
    assert main(["evaluate", "fashion-cnn", "--clients", str(tmp_path / "clients"), "--adapters", "em"]) == 0
    assert "on 2 clients" in capsys.readouterr().out


def test_an_adapter_without_its_quantities_is_refused(
    store: Path, data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "fashion-cnn", "--clients", str(data()), "--by", "owners")
    assert main([*words, "--adapters", "fed_ade"]) == 2
    assert "fed_ade needs anchors, which the bundle does not have" in capsys.readouterr().err
    assert main(["evaluate", "fashion-cnn"]) == 2
    assert "give --clients, labelled streams, or --data" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".json"])
def test_rates_of_the_authors_program_are_taken_by_position(
    suffix: str, store: Path, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = authors_order(bundle.model)
    values = np.linspace(-0.5, 0.5, len(order))
    file = tmp_path / f"rates{suffix}"
    if suffix == ".pt":
        torch.save(torch.from_numpy(values), file)
    elif suffix == ".npy":
        np.save(file, values)
    else:
        file.write_text(json.dumps(values.tolist()))
    assert main(["models", "import-atp", "fashion-cnn", "--rates", str(file), "--no-onnx"]) == 0
    bundle = Catalogue(store).load("fashion-cnn")
    assert bundle.model.source.rates == pytest.approx(dict(zip(order, values.tolist(), strict=True)))
    assert bundle.default().because == "no_labels"
    np.save(tmp_path / "few.npy", values[1:])
    assert main(["models", "import-atp", "fashion-cnn", "--rates", str(tmp_path / "few.npy")]) == 2
    assert "holds 22 rates, the network has 23 modules: conv1.weight, bn1.running_mean" in capsys.readouterr().err


def test_the_order_of_the_authors_program_is_layer_by_layer(bundle: Bundle) -> None:
    """As `order` of the recorded rates says."""
    norms = [f".{kind}" for kind in ("running_mean", "running_var", "weight", "bias")]
    expected = [
        "conv1.weight", *(f"bn1{k}" for k in norms), "conv2.weight", *(f"bn2{k}" for k in norms),
        "conv3.weight", *(f"bn3{k}" for k in norms), "linear4.weight", "linear4.bias",
        *(f"bn4{k}" for k in norms), "linear5.weight", "linear5.bias",
    ]  # fmt: skip
    assert authors_order(bundle.model) == tuple(expected)


def test_the_store_of_the_command_is_that_of_the_service() -> None:
    from acclimate_service.cli import DEFAULT_STORE
    from acclimate_service.settings import Settings

    assert Settings.model_fields["model_store"].default == DEFAULT_STORE
