"""The commands of `acclimate-bench` that measure what adapting costs.

What they run is imported when they run: it needs the SDK, which a service alone need not have.
"""

import argparse
from importlib import import_module
from pathlib import Path

from acclimate_bench.options import Subparsers, positive

CACHE = Path("~/.cache/acclimate-bench/litserve").expanduser()
"""Where the environment is kept that LitServe is installed into."""


def add_parsers(commands: Subparsers) -> None:
    """Add all of them."""
    speed = _command(commands, "speed", "what a step costs over the torch work it cannot avoid")
    speed.add_argument("--repeats", type=positive, default=40, help="of each piece of work (default: 40)")
    speed.add_argument("--device", default="cpu", help="of torch (default: cpu)")
    gpu = _command(commands, "gpu", "whether a GPU computes the same as the CPU, and what adapting costs there")
    gpu.add_argument("--repeats", type=positive, default=40, help="of each piece of work (default: 40)")
    gpu.add_argument("--batches", type=positive, default=10, help="of the stream that is compared (default: 10)")
    gpu.add_argument("--device", default="cuda", help="of torch; cpu rehearses without a card (default: cuda)")
    serve = _command(commands, "serve", "what HTTP, decoding and the durable write of the state add to a step")
    serve.add_argument("--repeats", type=positive, default=200, help="of each request (default: 200)")
    serve.add_argument("--peers", type=Path, default=CACHE, metavar="FOLDER", help=f"of LitServe (default: {CACHE})")
    serve.add_argument("--no-peers", dest="peers", action="store_const", const=None, help="leave LitServe out")
    clients = _command(commands, "clients", "what a Redis holds of very many clients, and what a batch costs then")
    clients.add_argument("--clients", type=positive, default=100_000, help="how many (default: 100000)")
    clients.add_argument("--budget", type=float, default=0.001, help="share of exact bytes (default: 0.001)")
    _without_timeline(serve)
    for name, text in (
        ("state", "what it costs that every answered batch is durable: time, bytes, takeovers"),
        ("replays", "how long clients wait whose states are computed again after a crash"),
        ("scale", "what becomes of memory and speed when the clients are many"),
        ("replicas", "how many rows one, two and four replicas answer, and what limits them"),
    ):
        quick = _command(commands, name, text)
        quick.add_argument("--quick", action="store_true", help="a fifth of the work, to see that everything runs")
        if name == "state":
            _without_timeline(quick)


def _command(commands: Subparsers, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables to a file, too")
    parser.set_defaults(run=_run, module=f"acclimate_bench.cost.{name}")
    return parser


def _without_timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-timeline", dest="timeline", action="store_false", help="with ACCLIMATE_TIMELINE=false")


def _run(options: argparse.Namespace) -> int:
    return int(import_module(options.module).run(options))
