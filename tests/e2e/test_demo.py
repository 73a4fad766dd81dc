import json
import signal
import subprocess
import sys
from statistics import mean
from typing import Any, NamedTuple

import httpx
import pytest

from acclimate_adapters import create
from acclimate_service.demo.command import DATA
from acclimate_store import Catalogue, load_streams

IN_PROCESS = {
    "none": create("none"),
    "atp batch": create("atp", mode="batch"),
    "atp online": create("atp", mode="online"),
}


class Shown(NamedTuple):
    """What the demo printed, and what it wrote; what its dashboard showed while it went on."""

    text: str
    page: str
    versions: list[int]
    accuracy: dict[str, list[float]]
    guarded: list[dict[str, Any]]
    chosen: list[dict[str, Any]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "acclimate_service.cli", "demo", "--stay", "--json", str(folder / "shown.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as demo:
        assert demo.stdout is not None
        lines = list[str]()
        while not lines or not lines[-1].startswith("The dashboard:"):
            lines.append(demo.stdout.readline())
            assert lines[-1], "it ended"
        url = lines[-1].split()[-1].removesuffix("/ui")
        page, versions = httpx.get(f"{url}/ui").text, [_version(url)]
        while len(versions) < 3:
            if (version := _version(url)) != versions[-1]:
                versions.append(version)
        demo.send_signal(signal.SIGINT)
        lines += demo.stdout.readlines()
    assert demo.returncode == 0
    return Shown("".join(lines), page, versions, **json.loads((folder / "shown.json").read_text()))


def _version(url: str) -> int:
    return int(httpx.get(f"{url}/clients/guarded").json()["state"]["version"])


def test_the_demo_shows_over_http_what_the_adapters_reach_in_process(shown: Shown) -> None:
    """Every client's accuracy by every method of the demo that is compared, to the image."""
    bundle = Catalogue(DATA / "bundles").load("fashion-tiny")
    streams = load_streams(DATA / "streams.npz")
    for title, adapter in IN_PROCESS.items():
        for stream, accuracy in zip(streams, shown.accuracy[title], strict=True):
            state, correct = adapter.init(bundle.model), 0
            for start in range(0, len(stream.images), 20):
                batch = slice(start, start + 20)
                step = adapter.step(bundle.model, state, bundle.prepare(stream.images[batch]))
                state = step.state
                correct += int((step.logits.argmax(-1).numpy() == stream.labels[batch]).sum())
            assert accuracy == pytest.approx(100 * correct / len(stream.images)), (title, stream.client_id)
    assert "mean" in shown.text


def test_the_demo_catches_the_client_that_adaptation_harms_by_a_few_labels(shown: Shown) -> None:
    caught = [moment["caught"] for moment in shown.guarded]
    assert caught == sorted(caught), "caught once, and not let go while adaptation harms"
    until = [moment for moment in shown.guarded if not moment["caught"]]
    assert 1 <= len(until) <= len(caught) - 4
    assert all(moment["guarded"] == moment["adapted"] for moment in until), "the guard does not touch the adapter"
    assert until[-1]["verdict"] == "harmful"
    assert 7 <= until[-1]["labels"] <= 6 * len(until), "seven losses are the fewest that convict, five in 20 are asked"
    assert " harmful " in shown.text


def test_the_guarded_client_of_the_demo_ends_as_well_as_the_frozen_model_and_the_adapted_one_does_not(
    shown: Shown,
) -> None:
    ends = {name: mean(m[name] for m in shown.guarded[-4:]) for name in ("frozen", "adapted", "guarded")}
    assert ends["guarded"] == ends["frozen"], "it is given the very same answers"
    assert ends["adapted"] < ends["frozen"] - 20
    assert f"frozen {mean(m['frozen'] for m in shown.guarded if m['caught']):.1f} %" in shown.text


def test_the_stream_of_the_demo_that_is_guarded_is_one_of_its_table(shown: Shown) -> None:
    """Sent again, it is adapted to as it was before: labels change answers, never the adaptation."""
    again = {name: mean(m[name] for m in shown.guarded) for name in ("frozen", "adapted")}
    harm = {
        (title, client): none - adapted
        for title, accuracies in shown.accuracy.items()
        for client, (none, adapted) in enumerate(zip(shown.accuracy["none"], accuracies, strict=True))
    }
    title, client = max(harm, key=lambda cell: harm[cell])
    assert again["adapted"] == pytest.approx(shown.accuracy[title][client])
    assert again["frozen"] == pytest.approx(shown.accuracy["none"][client])


def test_labels_choose_another_answer_for_the_client_that_the_fleet_s_method_harms_before_they_prove_it(
    shown: Shown,
) -> None:
    """By five labels at most, after which it is answered as by the frozen model; the test needs seven losses."""
    arms = [each["arm"] for each in shown.chosen]
    left = arms.index(0)
    assert arms == [1] * left + [0] * (len(arms) - left), "it begins with what the fleet prefers, and leaves it once"
    labels = shown.chosen[left - 1]["labels"]
    assert left >= 1
    assert labels <= 5
    proof = next(each["tested"] for each in shown.chosen if each["verdict"] == "harmful")
    assert proof >= 7
    since = {name: mean(each[name] for each in shown.chosen[left:]) for name in ("frozen", "guarded", "portfolio")}
    assert since["portfolio"] == since["frozen"] > since["guarded"]
    assert f"{labels} labels were enough to choose another answer" in shown.text
    assert f"harmful, by {proof} labels" in shown.text
    assert f"portfolio {since['portfolio']:.1f} %" in shown.text


def test_the_clients_between_whom_labels_choose_are_those_of_the_table_that_gain_and_lose_most(shown: Shown) -> None:
    streams = load_streams(DATA / "streams.npz")
    gains = [one - none for one, none in zip(shown.accuracy["bn_adapt+em"], shown.accuracy["none"], strict=True)]
    best, worst = (streams[gains.index(end)].client_id for end in (max(gains), min(gains)))
    assert max(gains) > 2
    assert min(gains) < -2
    assert f"{best} gains with bn_adapt+em, {worst} loses" in shown.text


def test_the_demo_goes_on_beside_a_dashboard_until_it_is_interrupted(shown: Shown) -> None:
    assert '<script type="module" src="ui/app.js">' in shown.page
    assert shown.versions == sorted(set(shown.versions))
