"""What a client with five batches a second sees alone, beside each attacker, beside all, and beside all elsewhere.

Run it on a machine that has nothing else to do: `cd tests/e2e && python -m hostile.table [SECONDS]`.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from conftest import Process, variables

from hostile.attackers import ATTACKS
from hostile.run import SETTINGS, Seen, attacked, send_batches, warm

SECONDS = 60


def row(name: str, seen: Seen, alone: Seen, replies: int = 0) -> None:
    p50, p99 = (1000 * float(np.quantile(seen.seconds, q)) for q in (0.5, 0.99))
    wrong = len(seen.refused) + len(seen.disturbed)
    print(f"{name:36} {p50:6.0f} {p99:6.0f} {seen.p99 / alone.p99:6.1f} {wrong:6} {replies:8}", flush=True)


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def serve(name: str) -> str:
            data = Path(folder) / name
            started = Process(variables(data_dir=data, **SETTINGS), Path(folder) / f"{name}.log")
            stack.callback(started.close)
            return started.url

        def beside(name: str, url: str, attacks: Sequence[str], seconds: float) -> None:
            with attacked(url, attacks) as told:
                seen = send_batches(service, "victim", seconds)
            row(name, seen, alone, sum(sum(each["replies"].values()) for each in told.values()))

        service = serve("service")
        warm(service)
        print(f"{'ms':36} {'p50':>6} {'p99':>6} {'times':>6} {'wrong':>6} {'replies':>8}")
        alone = send_batches(service, "victim", seconds / 2)
        row("alone", alone, alone)
        for name in ATTACKS:
            beside(f"beside {name}", service, [name], seconds / 4)
        beside("beside all eight", service, list(ATTACKS), seconds)
        beside("beside all eight at another service", serve("other"), list(ATTACKS), seconds / 2)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
