"""Real headless Chromium, pages whose errors fail their test, and a service with clients to be seen."""

from pathlib import Path

import pytest

from acclimate_client import Client, LabelledRow
from acclimate_store.samples import load_streams

ROOT = Path(__file__).parents[3]
STREAMS = ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
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


@pytest.fixture(scope="session")
def opened():
    """Open a page of a replica's dashboard."""

    def open_page(page, replica, place=""):
        page.goto(f"{replica.url}/ui#/{place}")
        page.wait_for_selector("h1")
        return page

    return open_page


@pytest.fixture(scope="session")
def row():
    """The row of a client in the table of all."""
    return lambda page, client: page.locator("tbody tr", has=page.locator(f"a:text-is('{client}')"))


@pytest.fixture(scope="session")
def act():
    """Press a button, see that nothing happens before it is confirmed, and confirm."""

    def press(page, name, fill=lambda dialog: None):
        page.get_by_role("button", name=name, exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name=name, exact=True).click()
        dialog = page.get_by_role("dialog")
        fill(dialog)
        dialog.get_by_role("button", name=name, exact=True).click()

    return press
