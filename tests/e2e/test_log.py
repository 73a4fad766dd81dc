"""The log of a service at its most talkative: no line names a client, or holds what it sent, alive or deleted."""

import hmac
import io
import json
import signal
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from redis import Redis

from acclimate_client import Client, LabelledRow
from acclimate_client.errors import ProblemError

PRIVATE = "patient"
"""Part of all ids of clients and of idempotency keys here, and of what stands in pictures."""
CLIENT, OTHER, UNKNOWN = f"{PRIVATE}-4711", f"{PRIVATE}-4712", f"{PRIVATE}-4713"
SECRET, KEY, CAPTION = "pepper", f"key-of-{PRIVATE}", f"caption-of-{PRIVATE}"
SERVE = """
from dataclasses import dataclass
from acclimate_adapters import ADAPTERS, State, Step
from acclimate_service.cli import main

@dataclass(frozen=True, slots=True)
class Contrary:  # says the class after the one that the frozen model sees
    name, layout, needs = "contrary", 1, frozenset()

    def init(self, model):
        return State(self.name, self.layout, model.content_hash)

    def step(self, model, state, x):
        if x[0, 0, 0, 0] > 1:  # a white pixel
            raise ZeroDivisionError("a defect of this adapter")
        frozen = model.frozen(model.batch(x)).logits
        return Step(frozen.roll(1, dims=-1), state.next(), {"entropy": 0.0}, frozen)

ADAPTERS["contrary"] = Contrary
main(["serve"])
"""


def labelled_batch(sdk, images, shift):
    """Send a batch, and tell for each row that the truth is so many classes after what was answered."""
    prediction = sdk.predict(CLIENT, images)
    labels = [(index + shift) % 10 for index in prediction.indices.tolist()]
    rows = [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(labels)]
    return sdk.feedback(CLIENT, rows)


def picture(kind):
    """A picture that says whose it is."""
    file, pixels = io.BytesIO(), Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28))
    if kind == "PNG":
        said = PngImagePlugin.PngInfo()
        said.add_text("Comment", CAPTION)
        pixels.save(file, kind, pnginfo=said)
    else:
        said = Image.Exif()
        said[0x010E] = CAPTION
        pixels.save(file, kind, exif=said)
    return file.getvalue()


def live(one, two, images):
    """The life of a client on two replicas, with all that a log tells of, and its end."""
    with Client(one, max_retries=0) as sdk, Client(two, max_retries=0) as other:
        labelled_batch(sdk, images, 1)
        sdk.configure(CLIENT, "contrary")
        until(lambda: labelled_batch(sdk, images, 9).guard.evidence.verdict, "harmful")
        assert sdk.predict(CLIENT, images).guard.answering == "frozen"
        sdk.configure(CLIENT, "atp")
        for number, each in enumerate((sdk, other, sdk)):  # its journal is taken over
            each.predict(CLIENT, images, idempotency_key=f"{KEY}-{number}")
        sdk.predict(OTHER, images)
        sdk.configure(OTHER, "contrary")
        fail(sdk, images)
        for kind in ("PNG", "JPEG", "TIFF"):
            sent = httpx.post(f"{one}/clients/{CLIENT}/predict", files={"image": (f"{CAPTION}.png", picture(kind))})
            assert sent.status_code == 200, sent.text
        assert httpx.post(f"{one}/clients/{CLIENT}/predict", content=CAPTION).status_code == 415
        assert httpx.get(f"{one}/clients/%20{CLIENT}").status_code == 422
        sdk.reset(CLIENT)
        other.delete(CLIENT)
        for late in (lambda: sdk.get(CLIENT), lambda: sdk.predict(CLIENT, images, idempotency_key=f"{KEY}-0")):
            with pytest.raises(ProblemError):
                late()


def fail(sdk, images):
    """Whatever is refused."""
    white = images.copy()
    white[0, ..., 0, 0] = 255
    for wrong in (
        lambda: sdk.predict(OTHER, white),
        lambda: sdk.feedback(UNKNOWN, [LabelledRow("0" * 32, 0, 1)]),
        lambda: sdk.configure(CLIENT, "no-such-adapter"),
        lambda: sdk.predict(CLIENT, images[:5], idempotency_key=f"{KEY}-0"),
    ):
        with pytest.raises(ProblemError):
            wrong()


def until(look, wanted):
    deadline = time.monotonic() + 60
    while (found := look()) != wanted:
        assert time.monotonic() < deadline, found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_no_line_names_a_client_or_what_it_sent_and_each_tells_it_by_its_hash(serve, stream, tmp_path, form):
    (images,), url = stream(0, 1), f"unix://{tmp_path}/data/redis.sock"
    settings = {
        "adapter": "none",
        "candidates": '["contrary"]',
        "candidate_share": 1,
        "guard_clients": 1,
        "guard": "adapt",
        "keep_snapshots": 0,
        "secret": SECRET,
        "log_level": "debug",
        "log_format": form,
    }
    command = (sys.executable, "-c", SERVE)
    one, two = serve(command=command, **settings), serve(command=command, redis_url=url, **settings)
    live(one.url, two.url, images)
    with Redis(unix_socket_path=url.removeprefix("unix://")) as redis:
        redis.set(f"acc:{{default/{UNKNOWN}}}:r", "of another type")
        assert httpx.get(f"{one.url}/clients/{UNKNOWN}").status_code == 503
    for each in (two, one):
        each.signal(signal.SIGTERM)
        assert each.wait() == 0
    lines = one.log.read_text().splitlines()
    assert not [line for line in lines if PRIVATE in line]
    hashed = hmac.new(SECRET.encode(), CLIENT.encode(), "sha256").hexdigest()[:16]
    about = [line for line in lines if hashed in line]
    for told in ("/clients/{client_id}/predict", "is answered by the frozen model"):
        assert [line for line in about if told in line], told
    told = "".join(lines)
    assert "a defect of this adapter" in told
    assert "of another type under a key" in told
    if form == "json":
        assert {json.loads(line)["level"] for line in lines} == {"info", "warning", "error"}
    for log in (tmp_path / "data").rglob("*.log"):
        assert PRIVATE not in log.read_text()
