"""Labels by hand: told on the page of a client, counted by the guard, with pictures where the operator allows it."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from acclimate_client import Client
from acclimate_store.samples import load_streams

pytestmark = pytest.mark.slow
STREAMS = Path(__file__).parents[3] / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"


@pytest.fixture
def asked(make_replica):
    """Start a service and send two batches of a client, some of whose labels it asks for."""

    def start(**settings):
        replica = make_replica(adapter="tent", ask_budget=0.2, **settings)
        with Client(replica.url) as client:
            images = load_streams(STREAMS)[0].images
            for start in range(0, 40, 20):
                client.predict("cam", images[start : start + 20])
            return replica, [(ask.request_id, ask.row) for ask in client.asks("cam")], images[:40]

    return start


def label(page, request_id, row, name):
    page.get_by_role("button", name=f"Label image {row} of request {request_id}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Tell").click()  # without a class, it is not told
    dialog.get_by_label("Class").select_option(name)
    dialog.get_by_role("button", name="Tell").click()
    page.get_by_text(f"Label of image {row}: counted as {name}.").wait_for()


def test_what_is_asked_is_labelled_without_pictures_and_counts(page, asked, opened, axe, expect):
    replica, questions, _ = asked()
    opened(page, replica, "clients/cam")
    open_questions = page.get_by_role("region", name="Open questions").locator("tbody tr")
    open_questions.first.wait_for()
    shown = [each.locator("th, td").all_inner_texts()[:2] for each in open_questions.all()]
    assert shown == [[request_id, str(row)] for request_id, row in questions]
    expect(page.locator("img")).to_have_count(0)
    expect(page.locator("main")).to_contain_text("ACCLIMATE_KEEP_IMAGES_BYTES", use_inner_text=True)
    label(page, *questions[0], "Coat")
    page.get_by_text("after 1 labels").wait_for()
    open_questions.nth(len(questions) - 1).wait_for(state="detached")
    with Client(replica.url) as client:
        evidence = client.get("cam").guard.evidence
        assert (evidence.labelled, evidence.asked) == (1, 1)
        assert len([*client.asks("cam")]) == len(questions) - 1
    assert axe(page) == []


def test_pictures_are_those_of_the_client_and_tell_their_class_once_it_is_known(page, asked, opened, axe, expect):
    replica, questions, images = asked(keep_images_bytes=2**20)
    opened(page, replica, "clients/cam")
    page.locator(".image.asked").first.wait_for()
    expect(page.locator(".image.asked")).to_have_count(len(questions))
    page.get_by_role("button", name="All 40 images").click()
    expect(page.locator(".image")).to_have_count(40)
    found = {_pixels(each.get_attribute("src")).tobytes() for each in page.locator(".image img").all()}
    assert found == {image.tobytes() for image in images}
    request_id, row = questions[-1]
    page.get_by_role("button", name=f"Label image {row} of request {request_id}").click()
    expect(page.get_by_role("dialog").locator("img")).to_have_count(1)
    assert axe(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    label(page, request_id, row, "Bag")
    page.get_by_text("Bag; answered").wait_for()
    page.locator(".image").nth(5).wait_for()
    assert axe(page) == []
    with Client(replica.url) as client:
        assert client.get("cam").guard.evidence.labelled == 1
        client.reset("cam")
    page.locator(".image").first.wait_for(state="detached")
    page.get_by_text("Nothing is asked, and there are no images.").wait_for()


def test_it_is_labelled_by_the_keyboard_alone(page, asked, opened):
    replica, questions, _ = asked(keep_images_bytes=2**20)
    opened(page, replica, "clients/cam")
    page.locator(".image.asked").first.wait_for()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Label":
            break
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    for _ in range(5):
        if page.evaluate("document.activeElement.tagName") == "SELECT":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("Sandal")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("counted as Sandal").wait_for()
    with Client(replica.url) as client:
        assert client.get("cam").guard.evidence.asked == 1
        assert len([*client.asks("cam")]) == len(questions) - 1


def _pixels(source):
    return np.asarray(Image.open(BytesIO(base64.b64decode(source.partition(",")[2]))))
