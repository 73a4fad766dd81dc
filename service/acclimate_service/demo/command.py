"""Stream real images of shifted clients to the service and show what adapting to them gains, and how harm is caught.

It starts the service on a private Redis and sends every sample client's stream in batches of 20 over HTTP, once per
method. One service serves them all: each stream is a client of its own per method, configured with that method. Then
the client that a method harmed most sends its stream once more, and a few true labels are told. And a method that helps
one client and harms another follows both, and labels choose who answers. Nothing is fetched, and nothing is kept.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from acclimate_adapters.errors import AcclimateError
from acclimate_service.demo import chosen
from acclimate_service.demo.caller import Caller
from acclimate_service.demo.guarded import GUARDED, Moment, conclusion, follow, lines
from acclimate_store.samples import ClientStream, load_streams

DATA: Final = Path(__file__).with_name("data")


class DemoError(AcclimateError):
    """The demo cannot be shown."""


ERRORS: Final = (AcclimateError,)
"""What ends a command with its message alone."""
BATCH = 20
ASKED: Final = 5
"""Images of a batch that labels are asked for, where the budget of batches before is spent."""
PAUSE_S: Final = 0.5
"""Between two batches of a client that streams on."""


@dataclass(frozen=True)
class Method:
    """An adapter with its hyper-parameters, under the name that the table shows."""

    title: str
    adapter: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


METHODS = (
    Method("none", "none"),
    Method("atp batch", "atp", {"mode": "batch"}),
    Method("atp online", "atp", {"mode": "online"}),
    Method("fedcal (em)", "fedcal", {"estimator": "em"}),
    Method("tent", "tent"),
    Method("bn_adapt+em", "bn_adapt+em"),
    Method("atp+fedcal", "atp+fedcal"),
)
CATCHING = """
Without labels nothing tells that {client} loses with {method}. The same again, batch by batch, accuracy in %.
Of the guarded client, those images are labelled that the service asks for, {asked} in {batch} at most: some in which
both predictions differ. A win is a label that only the adapted prediction has right, a loss one that only the frozen
prediction has right.
"""

CHOOSING = """
{gains} gains with {method}, {loses} loses. Now both have it as an arm of `portfolio`, beside the frozen model,
and are answered by the one that labels prefer: their own, and those of all clients. {gains} told its labels first,
so {loses} begins with {method}. The guarded client has {method} alone, and leaves it by a verdict.
"""
DIVIDING: Final = "bn_adapt+em"
"""A method that helps some clients and harms others."""

STAYING = """
The dashboard:   {url}/ui
The clients stream on, and "guarded" is harmed and caught anew every few seconds, until Ctrl-C.
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running_service(data_dir: str) -> Iterator[str]:
    """A service; yields its URL."""
    port = free_port()
    settings = {
        "ACCLIMATE_PORT": str(port),
        "ACCLIMATE_DATA_DIR": data_dir,
        "ACCLIMATE_MODEL_STORE": str(DATA / "bundles"),
        "ACCLIMATE_GUARD": "adapt",  # labels of one client shall decide for that client alone
        "ACCLIMATE_ASK_BUDGET": str(ASKED / BATCH),
        "ACCLIMATE_KEEP_IMAGES_BYTES": "1000000",  # they are anybody's
    }
    command = [sys.executable, "-m", "acclimate_service.cli", "serve"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    process = subprocess.Popen(command, env=inherited | settings, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Return when the service answers batches; stop the demo when it ended or does not come up."""
    caller, deadline = Caller(url), time.monotonic() + seconds
    while not caller.ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise DemoError("the service did not start; its messages are above")
        time.sleep(0.1)


def accuracy(caller: Caller, client_id: str, stream: ClientStream, progress: "tqdm[Any]") -> float:
    """Share of a client's images that the service labels right, in percent."""
    correct = 0
    for start in range(0, len(stream.images), BATCH):
        batch = slice(start, start + BATCH)
        answer = caller.predict(client_id, stream.images[batch])
        correct += int((answer.indices == stream.labels[batch]).sum())
        progress.update()
    return 100 * correct / len(stream.images)


def run(url: str, methods: Sequence[Method], streams: Sequence[ClientStream]) -> dict[str, list[float]]:
    """Accuracy by method and client, in percent."""
    batches = sum(-(-len(stream.images) // BATCH) for stream in streams)
    results: dict[str, list[float]] = {}
    caller = Caller(url)
    with tqdm(total=batches * len(methods), unit="batch", disable=None) as progress:
        for number, method in enumerate(methods):
            progress.set_description(method.title)
            results[method.title] = []
            for stream in streams:
                client_id = f"{stream.client_id}-{number}"
                caller.configure(client_id, method.adapter, method.hyperparameters)
                results[method.title].append(accuracy(caller, client_id, stream, progress))
    return results


def table(results: Mapping[str, Sequence[float]], streams: Sequence[ClientStream]) -> str:
    """The results for people: a row per client, a column per method, the mean below."""
    rows = [("client", "corruption", *results)]
    for i, stream in enumerate(streams):
        rows.append(
            (stream.client_id, f"{stream.corruption} {stream.severity}", *(f"{v[i]:.1f}" for v in results.values()))
        )
    rows.append(("mean", "", *(f"{np.mean(v):.1f}" for v in results.values())))
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if c < 2 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def most_harmed(
    results: Mapping[str, Sequence[float]], methods: Sequence[Method], streams: Sequence[ClientStream]
) -> tuple[Method, ClientStream]:
    """The method and the client with the largest loss against no adaptation."""
    losses = [[results["none"][i] - results[method.title][i] for i in range(len(streams))] for method in methods]
    method, stream = divmod(int(np.argmax(losses)), len(streams))
    return methods[method], streams[stream]


def catch(url: str, method: Method, stream: ClientStream) -> list[Moment]:
    """Show the guard at work on one client, batch by batch."""
    moments: list[Moment] = []

    def live() -> Iterator[Moment]:
        for moment in follow(Caller(url), stream, method.adapter, method.hyperparameters, BATCH):
            moments.append(moment)
            yield moment

    print(CATCHING.format(client=stream.client_id, method=method.title, asked=ASKED, batch=BATCH))
    for line in lines(live()):
        print(line, flush=True)
    print(f"\n{conclusion(moments)}")
    return moments


def divided(
    results: Mapping[str, Sequence[float]], streams: Sequence[ClientStream]
) -> tuple[ClientStream, ClientStream]:
    """The clients that gain and lose most by `DIVIDING`."""
    gains = np.subtract(results[DIVIDING], results["none"])
    return streams[int(gains.argmax())], streams[int(gains.argmin())]


def choose(url: str, gains: ClientStream, loses: ClientStream) -> list[chosen.Choice]:
    """Show how labels choose the answers of one client, batch by batch."""
    choices: list[chosen.Choice] = []

    def live() -> Iterator[chosen.Choice]:
        for choice in chosen.choose(Caller(url), DIVIDING, gains, loses, BATCH):
            choices.append(choice)
            yield choice

    print(CHOOSING.format(gains=gains.client_id, loses=loses.client_id, method=DIVIDING))
    for line in chosen.lines(live(), DIVIDING):
        print(line, flush=True)
    print(f"\n{chosen.conclusion(choices, DIVIDING)}")
    return choices


def stay(url: str, method: Method, harmed: ClientStream, streams: Sequence[ClientStream]) -> None:
    """Stream on until Ctrl-C: all clients under the last method, and, again and again, who is harmed and caught."""
    print(STAYING.format(url=url), flush=True)
    caller = Caller(url)
    with suppress(KeyboardInterrupt):
        while True:
            caller.reset(GUARDED)
            for moment in follow(caller, harmed, method.adapter, method.hyperparameters, BATCH):
                batch = slice((moment.number - 1) * BATCH, moment.number * BATCH)
                for stream in streams:
                    caller.predict(f"{stream.client_id}-{len(METHODS) - 1}", stream.images[batch])
                time.sleep(PAUSE_S)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; `arguments.json` is a file for what was measured, or None; with `arguments.stay` it goes on."""
    streams = load_streams(DATA / "streams.npz")
    with tempfile.TemporaryDirectory() as data_dir, running_service(data_dir) as url:
        results = run(url, METHODS, streams)
        print(f"\nAccuracy in %, {len(streams)} clients, {len(streams[0].images)} images each, batches of {BATCH}:\n")
        print(table(results, streams))
        harmed = most_harmed(results, METHODS, streams)
        moments = catch(url, *harmed)
        choices = choose(url, *divided(results, streams))
        print("\nYour own model:  acclimate models create --help")
        if arguments.json:
            guarded, chose = map(asdict, moments), map(asdict, choices)
            written = {"accuracy": results, "guarded": [*guarded], "chosen": [*chose]}
            arguments.json.write_text(json.dumps(written))
        if arguments.stay or sys.stdout.isatty():
            stay(url, *harmed, streams)
    return 0
