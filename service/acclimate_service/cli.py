"""The command `acclimate`, which can be ended from its first moment on.

Only the words are here. What a command needs, torch above all, is imported when it runs: `--help` answers at once.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from acclimate_learning import cli as learning
from acclimate_store import cli as models
from acclimate_store.cli import by_name

if TYPE_CHECKING:
    from acclimate_store.cli import Subparsers

_COMMANDS: Final = "acclimate_service.commands"
DEFAULT_STORE: Final = Path("model_store/bundles")
"""As `Settings.model_store`."""
_SERVE: Final = ("host", "port", "model", "adapter", "model_store", "redis_url", "data_dir", "keys_file", "device")
"""Settings that `serve` takes as options, too."""
_EXIT_CODES: Final = "exit status: 0 done; 1 a client is not there, or was refused; 2 the command could not be done"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 with one clear message when it cannot."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(words, argparse.Namespace(words=words))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(number: int, _: FrameType | None) -> None:
    """End the process at once, as the kernel does with others than the first of a container, which handles the signal.

    An exception would be lost in whatever is being imported. Before the command is at work, nothing is to be closed.
    """
    os._exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="acclimate", description="Adapted predictions for every client.")
    parser.add_argument("--version", action="version", version=f"acclimate {version('acclimate')}")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "answer batches over HTTP; set by ACCLIMATE_* variables, of which these go before"
    server = commands.add_parser("serve", help=text, description=text)
    for name in _SERVE:
        option = f"--{name.replace('_', '-')}"
        server.add_argument(option, dest=f"setting_{name}", metavar="VALUE", help=f"as ACCLIMATE_{name.upper()}")
    server.set_defaults(run=by_name(_COMMANDS, "run_server", "[serve]"))
    demo = commands.add_parser("demo", help="show what adaptation gains, and how harm is caught; fetches nothing")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured there")
    demo.add_argument(
        "--stay", action="store_true", help="stream on, with a dashboard, until Ctrl-C; so it does in a terminal"
    )
    demo.set_defaults(run=by_name("acclimate_service.demo.command", "run_demo", "[serve,embedded]"))
    one_round = commands.add_parser("round", help="run a federated round among the clients of a running service")
    one_round.set_defaults(run=by_name(_COMMANDS, "run_round", "[serve]"))
    advice = commands.add_parser("advise", help="say which adapter the labels told to a running service speak for")
    _add_remote(advice, "admin")
    advice.set_defaults(run=by_name(_COMMANDS, "run_advice", "[serve]"))
    guard = commands.add_parser("guard", help="what labels made of the answers")
    guard_commands = guard.add_subparsers(dest="guard_command", required=True)
    reset = guard_commands.add_parser("reset", help="let nothing count for the fleet that any client told so far")
    reset.set_defaults(run=by_name(_COMMANDS, "run_reset", "[serve]"))
    doctor = commands.add_parser(
        "doctor",
        help="look at what the service would stand on here, and say what to change",
        epilog="exit status: 0 it would serve; 1 there is a fault",
    )
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    doctor.set_defaults(run=by_name("acclimate_service.doctor", "run_doctor", "[serve]"))
    _add_clients(commands)
    _add_keys(commands)
    store = Path(os.environ.get("ACCLIMATE_MODEL_STORE") or DEFAULT_STORE)
    of_models = models.add_parser(commands, store)
    learning.add_import_atp(of_models, store)
    _add_remove(of_models, store)
    _add_rollouts(of_models)
    learning.add_parser(commands, store, _replay)
    return parser


def _replay() -> Any:
    """The guard for `evaluate --asked`: learning does not know the service."""
    from acclimate_service.guard.replay import answers

    return answers


def _add_remove(subparsers: "Subparsers", store: Path) -> None:
    text = "remove a version from the store, or a model whole, unless clients live on it"
    remove = subparsers.add_parser("remove", help=text, description=text)
    remove.add_argument("bundle", metavar="NAME[/VERSION]", help="without a version, all of them")
    remove.add_argument("--store", type=Path, default=store, help="model store (default: %(default)s)")
    remove.add_argument("--force", action="store_true", help="even if clients live on it")
    remove.set_defaults(run=by_name("acclimate_service.removal", "run_remove", "[serve]"))


def _add_rollouts(subparsers: "Subparsers") -> None:
    def add(name: str, text: str, bundle: str = "NAME[/VERSION]") -> argparse.ArgumentParser:
        text = f"of a running service: {text}"
        epilog = "exit status: 0 done, on all replicas; 1 the service refuses; 2 the command could not be done"
        command = subparsers.add_parser(name, help=text, description=text, epilog=epilog)
        command.add_argument("bundle", metavar=bundle)
        _add_remote(command, "admin")
        command.set_defaults(run=by_name("acclimate_service.rollout_commands", f"run_{name}", "[serve]"))
        return command

    def share(text: str) -> float:
        value = float(text)
        if not 0 <= value <= 1:
            raise argparse.ArgumentTypeError("a number from 0 to 1")
        return value

    add("load", "load a version, or the newest of the store, on all replicas; it answers nobody yet")
    unload = add("unload", "let go of a version, or of all that answer no clients")
    unload.add_argument("--force", action="store_true", help="also of a canary, whose clients are the default's then")
    canary = add("canary", "load a version and have it answer a share of the clients, the same ones as it grows")
    canary.add_argument("--share", type=share, required=True, metavar="SHARE", help="of the clients, 0 to 1")
    shadow = add("shadow", "load a version and show it a share of the batches: it answers nobody, and is only compared")
    shadow.add_argument("--share", type=share, required=True, metavar="SHARE", help="of the batches, 0 to 1; 0 ends it")
    add("promote", "have a version answer all clients; without a version the canary")
    add("rollback", "end the canary; where there is none, go back to the default before", "NAME")
    show = add("rollout", "show which versions answer clients, and what each replica has", "NAME")
    show.add_argument("--json", action="store_true", help="print JSON")


def _add_clients(commands: "Subparsers") -> None:
    of_clients = commands.add_parser("clients", help="the clients of a running service").add_subparsers(
        dest="clients_command", required=True
    )

    def add(name: str, scope: str, text: str) -> argparse.ArgumentParser:
        command = of_clients.add_parser(name, help=text, description=text, epilog=_EXIT_CODES)
        _add_remote(command, scope)
        command.add_argument("--model", help="whose clients, by its name (default: those of the default model)")
        command.add_argument("--json", action="store_true", help="print JSON, one client a line")
        command.set_defaults(run=by_name("acclimate_service.client_commands", f"run_{name}", "[serve]"))
        return command

    def add_filters(command: argparse.ArgumentParser) -> None:
        command.add_argument("--adapter", help="only clients that have it")
        command.add_argument("--active-since", metavar="TIME", help="only clients that changed since, by RFC 3339")
        command.add_argument("--verdict", choices=("trusted", "undecided", "harmful"), help="of their labels")

    def add_several(command: argparse.ArgumentParser) -> None:
        command.add_argument("client", nargs="*", metavar="CLIENT")
        command.add_argument("--all", action="store_true", help="every client that the filters leave")
        add_filters(command)

    add_filters(add("list", "read", "list clients that have a state"))
    add("show", "read", "show a client").add_argument("client", metavar="CLIENT")
    export = add("export", "read", "write the states of clients into a folder")
    add_several(export)
    export.add_argument("--to", type=Path, default=Path("states"), metavar="FOLDER", help="default: %(default)s")
    export.add_argument("--cursor", help="with --all: go on where an export broke off, as it said")
    delete = add("delete", "write", "delete clients and all that was learned for them")
    add_several(delete)
    asked = "mean it, of --all; else whoever is at a terminal is asked, for which the key needs `read`, too"
    delete.add_argument("--yes", action="store_true", help=asked)


def _add_remote(command: argparse.ArgumentParser, scope: str) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    command.add_argument("--key-file", type=Path, metavar="FILE", help=f"that holds an API key with scope {scope}")


def _add_keys(commands: "Subparsers") -> None:
    keys = commands.add_parser("keys", help="API keys of tenants").add_subparsers(dest="keys_command", required=True)
    create = keys.add_parser("create", help="make a key, print it once, and its line for the file of the keys")
    create.add_argument("--tenant", required=True, help="whose clients the key is for")
    create.add_argument(
        "--scope", required=True, metavar="SCOPE,...", help="predict, read, write, admin: what it is good for"
    )
    create.set_defaults(run=by_name("acclimate_service.keys", "run_create"))


if __name__ == "__main__":
    sys.exit(main())
