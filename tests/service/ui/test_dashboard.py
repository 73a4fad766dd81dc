"""The dashboard in a real browser: it shows the numbers of the interface, live, and asks before it does anything."""

import json
import time
from pathlib import Path

import pytest

from acclimate_client import Client, LabelledRow
from acclimate_service import ui
from acclimate_store.samples import load_streams

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STREAMS = ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
PICTURES = ROOT / "docs" / "images"
DEADLINE_MS = 60_000


@pytest.fixture
def page(browser, make_replica):  # closed before what it watches ends
    """A page whose errors fail the test: of scripts, of the content security policy, of requests."""
    wrong: list[str] = []

    def said(message):
        if message.type in ("error", "warning") and "status of 4" not in message.text:  # of which the page tells
            wrong.append(message.text)

    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(DEADLINE_MS)
    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert wrong == []


@pytest.fixture
def fleet(make_replica):
    """A service with four clients: one well, one harmed by labels, one with a prior, one paused."""
    replica = make_replica(adapter="atp")
    with Client(replica.url) as client:
        client.configure("harmed", "tent", lr=0.3)
        client.configure("prior", "atp+fedcal")
        for name, stream in zip(("well", "harmed", "prior", "paused"), load_streams(STREAMS), strict=False):
            for start in range(0, 160, 20):
                images, labels = stream.images[start : start + 20], stream.labels[start : start + 20]
                given = client.predict(name, images)
                if name == "harmed":
                    rows = [LabelledRow(given.request_id, row, int(label)) for row, label in enumerate(labels)]
                    client.feedback(name, rows)
        client.pause("paused")
        yield replica, client


def opened(page, replica, place=""):
    page.goto(f"{replica.url}/ui#/{place}")
    page.wait_for_selector("h1")
    return page


def row(page, client):
    return page.locator("tbody tr", has=page.locator(f"a:text-is('{client}')"))


def test_the_fleet_shows_what_the_interface_lists(page, fleet):
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
    assert "✕ harmful" in row(page, "harmed").inner_text()


def test_the_fleet_is_live_searched_filtered_sorted_and_linked_to(page, fleet):
    replica, client = fleet
    opened(page, replica)
    client.predict("newcomer", load_streams(STREAMS)[0].images[:20])
    row(page, "newcomer").wait_for()
    page.get_by_label("Verdict").select_option("harmful")
    assert page.locator("tbody a").all_inner_texts() == ["harmed"]
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("Search").fill("p")
    assert page.locator("tbody a").all_inner_texts() == ["paused", "prior"]
    page.get_by_role("button", name="Client").click()
    assert page.locator("tbody a").all_inner_texts() == ["prior", "paused"]
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    page.wait_for_selector("tbody a")
    assert page.locator("tbody a").all_inner_texts() == ["prior", "paused"]


def test_a_client_shows_its_timeline_labels_prior_and_modules(page, fleet):
    replica, client = fleet
    opened(page, replica, "clients/prior")
    page.wait_for_selector("canvas")
    timeline = client.timeline("prior")
    page.locator("summary", has_text="Entropy").click()
    newest = timeline.points[-1]
    cells = page.locator("details[open] tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == [str(newest.version), "1", f"{newest.signals['entropy']:.3g}"]
    assert page.locator("details[open] tbody tr").count() == len(timeline.points)
    assert "configured" in page.locator("details[open]").inner_text()
    for name, trained, share in zip(timeline.classes, timeline.training_prior, newest.prior, strict=True):
        said = page.locator(".prior tr", has=page.locator(f"th:text-is('{name}')")).inner_text()
        assert f"{100 * trained:.1f} %" in said
        assert f"{100 * share:.1f} %" in said
    measured = [point for point in timeline.points if point.modules][-1]
    assert page.locator(".heat tbody th").all_inner_texts() == list(measured.modules)
    opened(page, replica, "clients/harmed")
    evidence = client.get("harmed").guard.evidence
    said = page.locator("section", has=page.locator("h2:text-is('Labels')")).inner_text()
    assert f"after {evidence.labelled} labels: {evidence.wins} wins, {evidence.losses} losses" in said
    assert f"{100 * evidence.adapted.low:.1f} % to {100 * evidence.adapted.high:.1f} %" in said


def test_a_batch_is_seen_as_it_comes(page, fleet):
    replica, client = fleet
    opened(page, replica, "clients/well")
    page.locator("summary", has_text="Entropy").click()
    before = page.locator("details[open] tbody tr").count()
    version = client.predict("well", load_streams(STREAMS)[1].images[:20]).state.version
    page.locator(f"details[open] tbody td:text-is('{version}')").wait_for()
    assert page.locator("details[open] tbody tr").count() == before + 1


def act(page, name, fill=lambda dialog: None):
    """Press a button, see that nothing happens before it is confirmed, and confirm."""
    page.get_by_role("button", name=name, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name=name, exact=True).click()
    dialog = page.get_by_role("dialog")
    fill(dialog)
    dialog.get_by_role("button", name=name, exact=True).click()


def test_every_action_asks_first_and_works(page, fleet):
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


def test_a_client_is_rolled_back_to_the_version_chosen(page, fleet):
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


def test_what_is_refused_is_said_where_it_was_asked(page, fleet):
    replica, _ = fleet
    opened(page, replica, "clients/prior")
    page.get_by_role("button", name="Configure", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Adapter").select_option("tent")
    dialog.get_by_label("Hyper-parameters").fill('{"lr": "fast"}')
    dialog.get_by_role("button", name="Configure", exact=True).click()
    assert "lr" in dialog.get_by_role("alert").inner_text()


def test_models_and_health_show_what_the_service_says(page, fleet):
    replica, client = fleet
    opened(page, replica, "models")
    page.wait_for_selector("h2")
    (model,) = client.models()
    said = page.locator("main").inner_text()
    assert all(each in said for each in (model.name, model.version, *model.classes))
    (entry,) = [each for each in client.evidence(model.name).adapters if each.adapter == "tent"]
    assert str(entry.evidence.losses) in page.locator("tr", has_text="tent").inner_text()
    opened(page, replica, "health")
    page.get_by_text("✓ Ready").wait_for()
    assert page.locator("tr", has_text="/clients/{client_id}/predict").count() == 1
    assert page.locator("dt:text-is('state sessions') + dd").inner_text() == str(len(replica.service.sessions))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_screen(page, fleet, axe, scheme, width):
    replica, _ = fleet
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    for place, there in (
        ("", "tbody a"),
        ("clients/prior", ".heat"),
        ("clients/harmed", ".intervals"),
        ("models", "tbody tr"),
        ("health", "tbody tr"),
    ):
        opened(page, replica, place).wait_for_selector(there)
        assert axe(page) == [], place
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
    opened(page, replica, "clients/prior").get_by_role("button", name="Delete", exact=True).click()
    assert axe(page) == [], "question"


def test_it_is_used_by_the_keyboard_alone(page, fleet):
    replica, _ = fleet
    opened(page, replica).wait_for_selector("tbody a")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "harmed":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('harmed')")


def test_with_keys_it_asks_for_one_and_forgets_it_with_the_tab(browser, make_replica, tmp_path, axe):
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


def test_ten_thousand_clients_are_there_within_a_second(page, make_replica):
    replica = make_replica(adapter="none")
    _multiply(replica, 10_000)
    page.goto(f"{replica.url}/ui#/health")  # whatever a first page costs a browser
    page.wait_for_selector("tbody tr")
    began = time.monotonic()
    page.goto(f"{replica.url}/ui#/")
    page.wait_for_selector("tbody a")
    page.get_by_label("Search").fill("copy-1")
    shown = time.monotonic() - began
    page.get_by_label("Search").fill("")
    page.locator("output", has_text="10,000 of 10,000").wait_for()
    page.locator("output", has_text="so far").wait_for(state="detached")
    assert page.locator("tbody tr").count() < 100
    page.locator(".fleet").evaluate("view => { view.scrollTop = view.scrollHeight }")
    page.wait_for_selector("a:text-is('copy-9999')")
    assert shown < 1.0


def _multiply(replica, count):
    """As many clients as this, all with the state of one."""
    with Client(replica.url) as client:
        client.predict("copy-0", load_streams(STREAMS)[0].images[:2])
    originals = {key: replica.redis.dump(key) for key in replica.redis.scan_iter("acc:{default/copy-0}*")}
    pipe = replica.redis.pipeline(transaction=False)
    for number in range(1, count):
        for key, value in originals.items():
            pipe.restore(key.replace(b"/copy-0}", b"/copy-%d}" % number), 3_600_000, value)
    pipe.execute()


def test_pictures_of_the_documents(page, fleet):
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
