"""What HTTP, decoding and the durable write of the state add to a step, and how LitServe serves the same network.

    acclimate-bench serve [--repeats 200] [--peers FOLDER | --no-peers] [--no-timeline] [--json FILE]

A replica on a private Redis answers requests with a batch of 20 raw uint8 images and, in turn, takes the same guarded
steps without them. The difference of the medians is the price of serving; requests are sent over a bare socket, as to
LitServe, and what the SDK adds to them has a row of its own. So has the CPU time of the event loop: it tells whether
serving became cheaper where other work of the machine blurs the times. The replica computes in torch, and once more
with the graphs for ONNX Runtime where the bundle has any, as by default.
"""

import argparse
import subprocess
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from acclimate_bench.cost import peers
from acclimate_bench.cost.inputs import BUNDLES, noise
from acclimate_bench.cost.load import one_by_one
from acclimate_bench.cost.networks import write_resnet
from acclimate_bench.cost.remote import Work, in_blocks, local
from acclimate_bench.cost.replica import Replica, over_http
from acclimate_bench.cost.report import Report, verdict
from acclimate_bench.cost.stepping_replica import in_process, replica_with_steps

SHAPES: Final = {"fashion-cnn": (1, 28, 28), "resnet18": (3, 32, 32)}
ADAPTERS: Final = {"fashion-cnn": ("none", "fedcal", "atp"), "resnet18": ("none", "fedcal", "atp")}
RUNTIMES: Final = {"fashion-cnn": ("torch", "onnx"), "resnet18": ("torch",)}
"""Of the service."""
BOUND: Final = ("none", "atp")
"""Adapters that have a target."""
TARGET_MS: Final = 3.0
COLUMNS: Final = ("p50", "p5", "p95", "minus in process", "target")


def run(options: argparse.Namespace) -> int:
    """Print the differences, and the comparison."""
    report, threads = Report(), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_resnet(base / "bundles")
        for model, bundles in (("fashion-cnn", BUNDLES), ("resnet18", base / "bundles")):
            sides = " x ".join(map(str, SHAPES[model]))
            for runtime in _runtimes(model):
                how = f"CPU, {threads} threads, service on {runtime}, {options.repeats} repeats (ms)"
                report.table(f"{model}, 20 x {sides} raw uint8, {how}", *COLUMNS)
                for adapter in ADAPTERS[model]:
                    data = base / f"{model}-{adapter}-{runtime}"
                    price(report, data, bundles, model, adapter, options.repeats, runtime, timeline=options.timeline)
        if options.peers is not None:
            _beside_litserve(report, options.peers, base / "peers", threads)
    report.finish(options.json)
    return 0


def price(
    report: Report,
    data: Path,
    bundles: Path,
    model: str,
    adapter: str,
    repeats: int,
    runtime: str = "torch",
    *,
    timeline: bool = True,
) -> None:
    """Print what serving adds to the steps of one adapter, and what HTTP takes alone."""
    settings = {"model_store": bundles, "model": model, "adapter": adapter, "runtime": runtime, "timeline": timeline}
    with replica_with_steps(data, **settings) as served:
        port, shape = int(served.url.rpartition(":")[2]), SHAPES[model]
        bare = partial(one_by_one, port, "/clients/bare/predict", shape)
        by_sdk, live = local(over_http(served, "sdk", noise(*shape))), local(served.client.live)
        loop = partial(loop_seconds, served, bare)
        alone, *requests, loops, check = in_blocks(
            repeats, partial(in_process, served, adapter), bare, by_sdk, loop, live
        )
    report.row("GET live, HTTP alone", check.median, *check.spread, "", "")
    report.row(f"{adapter} in process, {runtime}", alone.median, *alone.spread, "", "")
    for how, target, request in zip(("over HTTP", "by the SDK"), (TARGET_MS, None), requests, strict=True):
        extra = request.median - alone.median
        bound = verdict(extra, target) if target is not None and adapter in BOUND else ""
        report.row(f"{adapter} {how}, durable, {runtime}", request.median, *request.spread, extra, bound)
    report.row(f"{adapter} over HTTP, CPU of the event loop", loops.median, *loops.spread, "", "")


def loop_seconds(served: Replica, work: Work, times: int) -> list[float]:
    """CPU seconds of the event loop for each of so many requests, which is known of all together."""
    before = served.loop_s
    work(times)
    return [(served.loop_s - before) / times] * times


def _runtimes(model: str) -> tuple[str, ...]:
    if find_spec("onnxruntime") is None:
        return ("torch",)
    return RUNTIMES[model]


def _beside_litserve(report: Report, folder: Path, data: Path, threads: int) -> None:
    try:
        python = peers.prepare_litserve(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"\nLitServe is left out: it could not be installed into {folder}: {error}")
        return
    shape = ",".join(map(str, SHAPES["fashion-cnn"]))
    peers.compare(report, python, BUNDLES, "fashion-cnn", shape, data, threads, _runtimes("fashion-cnn"))
