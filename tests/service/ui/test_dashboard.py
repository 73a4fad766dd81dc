"""The dashboard in a real browser: it shows the numbers of the interface, live, and asks before it does anything."""

import json
import shutil
from pathlib import Path

import pytest

from acclimate_client import Client
from acclimate_service import ui
from acclimate_store.samples import load_streams

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STREAMS = ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
BUNDLE = ROOT / "model_store" / "bundles" / "fashion-cnn" / "1"
PICTURES = ROOT / "docs" / "images"


def test_the_fleet_shows_what_the_interface_lists(page, fleet, opened, row, expect):
    replica, client = fleet
    opened(page, replica)
    for listed in client.clients().clients:
        said = row(page, listed.client_id).inner_text()
        assert listed.adapter in said
        assert listed.adaptation in said
        assert (listed.verdict or "") in said
        assert f"\t{listed.version}\t" in said
        if listed.gain is not None:
            assert f"{100 * listed.gain:.1f}" in said
    expect(row(page, "harmed")).to_contain_text("✕ harmful", use_inner_text=True)


def test_the_fleet_is_live_searched_filtered_sorted_and_linked_to(page, fleet, opened, row, expect):
    replica, client = fleet
    opened(page, replica)
    client.predict("newcomer", load_streams(STREAMS)[0].images[:20])
    row(page, "newcomer").wait_for()
    page.get_by_label("Verdict").select_option("harmful")
    expect(page.locator("tbody a")).to_have_text(["harmed"], use_inner_text=True)
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("Search").fill("p")
    expect(page.locator("tbody a")).to_have_text(["paused", "prior"], use_inner_text=True)
    page.get_by_role("button", name="Client").click()
    expect(page.locator("tbody a")).to_have_text(["prior", "paused"], use_inner_text=True)
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    page.wait_for_selector("tbody a")
    expect(page.locator("tbody a")).to_have_text(["prior", "paused"], use_inner_text=True)


def test_a_client_shows_its_timeline_labels_prior_and_modules(page, fleet, opened, expect):
    replica, client = fleet
    opened(page, replica, "clients/prior")
    page.wait_for_selector("canvas")
    timeline = client.timeline("prior")
    page.locator("summary", has_text="Entropy").click()
    page.wait_for_selector("details[open] tbody tr")
    newest = timeline.points[-1]
    cells = page.locator("details[open] tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == [str(newest.version), "1", f"{newest.signals['entropy']:.3g}"]
    expect(page.locator("details[open] tbody tr")).to_have_count(len(timeline.points))
    expect(page.locator("details[open]")).to_contain_text("configured", use_inner_text=True)
    for name, trained, share in zip(timeline.classes, timeline.training_prior, newest.prior, strict=True):
        said = page.locator(".prior tr", has=page.locator(f"th:text-is('{name}')")).inner_text()
        assert f"{100 * trained:.1f} %" in said
        assert f"{100 * share:.1f} %" in said
    measured = [point for point in timeline.points if point.modules][-1]
    expect(page.locator(".heat tbody th")).to_have_text(list(measured.modules), use_inner_text=True)
    opened(page, replica, "clients/harmed")
    evidence = client.get("harmed").guard.evidence
    said = page.locator("section", has=page.locator("h2:text-is('Labels')")).inner_text()
    assert f"after {evidence.labelled} labels: {evidence.wins} wins, {evidence.losses} losses" in said
    assert f"{100 * evidence.adapted.low:.1f} % to {100 * evidence.adapted.high:.1f} %" in said


def test_a_batch_is_seen_as_it_comes(page, fleet, opened, expect):
    replica, client = fleet
    opened(page, replica, "clients/well")
    page.locator("summary", has_text="Entropy").click()
    page.wait_for_selector("details[open] tbody tr")
    before = page.locator("details[open] tbody tr").count()
    version = client.predict("well", load_streams(STREAMS)[1].images[:20]).state.version
    page.locator(f"details[open] tbody td:text-is('{version}')").wait_for()
    expect(page.locator("details[open] tbody tr")).to_have_count(before + 1)


def test_every_action_asks_first_and_works(page, fleet, opened, act):
    replica, client = fleet
    opened(page, replica, "clients/well")
    version = client.get("well").state.version
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert client.get("well").adaptation == "running"
    act(page, "Pause")
    page.get_by_text("Pause of well: done").wait_for()
    assert client.get("well").adaptation == "paused"
    act(page, "Resume")
    page.get_by_text("Resume of well: done").wait_for()
    assert client.get("well").adaptation == "running"
    assert client.get("well").state.version == version + 2
    act(page, "Configure", lambda dialog: dialog.get_by_label("Adapter").select_option("fedcal"))
    page.get_by_text("Configure of well: done").wait_for()
    assert client.get("well").adapter == "fedcal"
    client.predict("well", load_streams(STREAMS)[0].images[:20])
    act(page, "Reset")
    page.get_by_text("Reset of well: done").wait_for()
    assert client.get("well").state.status == "reset"
    act(page, "Delete")
    page.wait_for_selector("h1:text-is('Clients')")
    assert all(each.client_id != "well" for each in client.clients().clients)


def test_a_client_is_rolled_back_to_the_version_chosen(page, fleet, opened, act):
    replica, client = fleet
    client.configure("old", "fedcal")
    client.predict("old", load_streams(STREAMS)[0].images[:20])
    client.predict("old", load_streams(STREAMS)[0].images[20:40])
    kept = client.get("old").state.kept
    assert kept
    opened(page, replica, "clients/old")
    act(page, "Roll back")
    page.get_by_text("Roll back of old: done").wait_for()
    assert client.timeline("old").points[-1].events == {"rollback": 1}


def test_what_is_refused_is_said_where_it_was_asked(page, fleet, opened, expect):
    replica, _ = fleet
    opened(page, replica, "clients/prior")
    page.get_by_role("button", name="Configure", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Adapter").select_option("tent")
    dialog.get_by_label("Hyper-parameters").fill('{"lr": "fast"}')
    dialog.get_by_role("button", name="Configure", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("lr", use_inner_text=True)


def test_a_model_shows_its_manifest_its_rates_and_what_labels_say(page, fleet, opened, expect):
    replica, client = fleet
    opened(page, replica, "models")
    page.wait_for_selector("text=Adaptation rates")
    (model,) = client.models()
    said = page.locator("main").inner_text()
    assert all(each in said for each in (model.name, model.version, *model.classes))
    (entry,) = [each for each in client.evidence(model.name).adapters if each.adapter == "tent"]
    expect(page.locator("tr", has_text="tent")).to_contain_text(str(entry.evidence.losses), use_inner_text=True)
    told = replica.http.get(f"/models/{model.name}/manifest").json()
    rates = page.get_by_role("region", name="Adaptation rates")
    expect(rates.locator("tbody th")).to_have_text(list(told["rates"]), use_inner_text=True)
    shown = [float(text) for text in rates.locator("tbody td").all_inner_texts()]
    assert shown == pytest.approx(list(told["rates"].values()), rel=6e-3)
    judged = page.get_by_role("region", name="Shown before deployment").inner_text()
    evidence = told["manifest"]["evidence"]
    assert f"+{100 * evidence['gain']:.1f}\t+{100 * evidence['low']:.1f} to +{100 * evidence['high']:.1f}" in judged
    manifest = page.get_by_role("region", name="Manifest").inner_text()
    assert all(each in manifest for each in (*told["manifest"]["files"].values(), told["manifest"]["licence"]))
    page.get_by_text("of the clients, default").wait_for()
    versions = page.get_by_role("region", name="Versions").locator("tbody tr").all_inner_texts()
    assert versions == [f"{each['version']}\t100.0 % of the clients, default" for each in told["versions"]]


def test_health_shows_what_the_replica_says_of_itself_and_its_redis(page, fleet, opened, wait_until, expect):
    replica, _ = fleet
    wait_until(lambda: replica.http.get("/replicas").json()["replicas"][0]["stages"].get("answer", {}).get("number"))
    opened(page, replica, "health")
    page.get_by_text("✓ Ready", exact=True).wait_for()
    page.locator("tr", has_text="Computing").wait_for()
    told = replica.http.get("/replicas").json()
    (said,) = told["replicas"]
    table = page.get_by_role("region", name="Replicas")
    expect(table.locator("thead th")).to_have_text(["What", said["name"]], use_inner_text=True)
    shown = dict(each.locator("th, td").all_inner_texts() for each in table.locator("tbody tr").all())
    wanted = {
        "State": "✓ ready",
        "Models": "fashion-cnn/1",
        "Batches under way": str(said["waiting"]),
        "Clients in memory": str(said["clients_in_memory"]),
        "their states, MB": f"{said['state_bytes'] / 1e6:.3g}",
        "Leases: journals it writes": str(said["leases"]),
        "their entries": str(said["journal_entries"]),
        "their size, MB": f"{said['journal_bytes'] / 1e6:.3g}",
    }
    assert wanted.items() <= shown.items()
    assert said["clients_in_memory"] == len(replica.service.sessions) == 4
    assert said["leases"] >= 3
    computing = page.locator("tr", has_text="Computing").locator("td").all_inner_texts()
    stage = said["stages"]["compute"]
    assert computing == [f"{stage['number']:g}", *(f"≤ {1000 * stage[q]:g} ms" for q in ("p50_s", "p95_s"))]
    page.get_by_text("Append-only file").wait_for()
    facts = page.locator("dl").inner_text()
    assert told["redis"]["version"] in facts
    assert "✓ written" in facts
    assert "noeviction" in facts


def test_of_several_models_the_one_that_is_chosen_is_shown(page, make_replica, tmp_path, opened, row, act, expect):
    for name in ("one", "two"):
        folder = shutil.copytree(BUNDLE, tmp_path / "store" / name / "1")
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest.replace('"name": "fashion-cnn"', f'"name": "{name}"'))
    replica = make_replica(model_store=tmp_path / "store", models=("one", "two"), adapter="none")
    images = load_streams(STREAMS)[0].images[:20]
    with Client(replica.url) as client, Client(replica.url, model="two") as of_other:
        client.predict("first", images)
        of_other.predict("second", images)
    opened(page, replica)
    row(page, "first").wait_for()
    page.get_by_label("Model").select_option("two")
    row(page, "second").wait_for()
    expect(page.locator("tbody a")).to_have_text(["second"], use_inner_text=True)
    page.locator("a:text-is('second')").click()
    page.locator("dd", has_text="two 1").wait_for()
    assert page.url.endswith("#/clients/second?model=two")
    act(page, "Pause")
    page.get_by_text("Pause of second: done").wait_for()
    assert replica.http.get("/models/two/clients/second").json()["adaptation"] == "paused"
    act(page, "Configure", lambda dialog: dialog.get_by_label("Adapter").select_option("fedcal"))
    page.get_by_text("Configure of second: done").wait_for()
    assert replica.http.get("/models/two/clients/second").json()["adapter"] == "fedcal"
    opened(page, replica, "models/two").wait_for_selector("h1:text-is('two')")
    page.get_by_label("Model").select_option("one")
    page.wait_for_selector("h1:text-is('one (default)')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_screen(page, fleet, axe, scheme, width, opened):
    replica, _ = fleet
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    for place, there in (
        ("", "tbody a"),
        ("clients/prior", ".heat"),
        ("clients/harmed", ".intervals"),
        ("models", "text=SHA-256"),
        ("health", "text=Append-only file"),
    ):
        opened(page, replica, place).wait_for_selector(there)
        assert axe(page) == [], place
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
    opened(page, replica, "clients/prior").get_by_role("button", name="Delete", exact=True).click()
    assert axe(page) == [], "question"
    opened(page, replica, "clients/harmed").locator("summary", has_text="Agreement").click()
    page.wait_for_selector("details[open] tbody tr")
    assert axe(page) == [], "numbers"


def test_it_is_used_by_the_keyboard_alone(page, fleet, opened):
    replica, _ = fleet
    opened(page, replica).wait_for_selector("tbody a")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "harmed":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('harmed')")


def test_with_keys_it_asks_for_one_and_forgets_it_with_the_tab(browser, make_replica, tmp_path, axe, row):
    from acclimate_service.keys import create

    key, line = create("acme", ["predict", "read", "write"])
    keys = tmp_path / "keys"
    keys.write_text(line + "\n")
    replica = make_replica(keys_file=keys, adapter="fedcal")
    with Client(replica.url, api_key=key) as client:
        client.predict("own", load_streams(STREAMS)[0].images[:20])
    page = browser.new_page()
    page.goto(f"{replica.url}/ui")
    page.get_by_label("API key").fill("acclimate_00000000_no")
    page.get_by_role("button").click()
    page.get_by_role("alert").wait_for()
    assert axe(page) == []
    page.get_by_label("API key").fill(key)
    page.get_by_role("button").click()
    row(page, "own").wait_for()
    page.goto(f"{replica.url}/ui#/clients/own")
    page.wait_for_selector("canvas")
    assert page.evaluate("Object.keys(localStorage).length") == 0
    assert page.context.cookies() == []
    other = browser.new_page()
    other.goto(f"{replica.url}/ui")
    other.get_by_label("API key").wait_for()
    other.close()
    page.close()


def test_pictures_of_the_documents(page, fleet, opened):
    """The pages that they show can be drawn, and the pictures are there; whether they are alike people have to see."""
    replica, _ = fleet
    for place, there, name in (("", "tbody a", "dashboard-fleet"), ("clients/prior", ".heat", "dashboard-client")):
        opened(page, replica, place).wait_for_selector(there)
        page.wait_for_timeout(500)
        picture = page.screenshot(full_page=place != "")
        assert len(picture) > 10_000
        assert (PICTURES / f"{name}.png").exists()


def test_the_files_are_all_there_and_none_holds_code_in_the_page():
    text = (ui.FILES / "index.html").read_text()
    assert "<script>" not in text
    assert "onclick" not in text
    assert {"/ui", "/ui/app.js", "/ui/vendor/LICENSES.txt"} <= set(ui.PATHS)
    assert "unsafe" not in ui.POLICY
    licences = (ui.FILES / "vendor" / "LICENSES.txt").read_text()
    assert all(
        name in licences for name in ("htm", "preact", "uPlot", "Permission is hereby granted", "Apache License")
    )
    assert json.dumps(licences)
