"""Run histories from the command line: `python tests/service/state/checker --seed 7` replays one and prints it."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # the package of this folder, however it is started

from checker.history import History  # noqa: E402
from checker.lab import open_lab, patched  # noqa: E402
from checker.mutations import MUTATIONS  # noqa: E402
from checker.profile import Profile  # noqa: E402

from acclimate_service.state.redis.embedded import EmbeddedRedis  # noqa: E402


def tell(history: History) -> None:
    """Print every call in the order of its start."""
    calls = [(call, number, op) for number, op in enumerate(history.ops) for call in op.calls]
    begin = min((call.start for call, _, _ in calls), default=0.0)
    lines = [
        (
            call.start,
            f"{op.kind} {number}, batch {op.number or '-'}, key {op.request.rid[:6]} model {op.model[-1]} "
            f"on {call.replica}: {call.fate} until {call.end - begin:.3f}: {call.applied or repr(call.error)}",
        )
        for call, number, op in calls
    ]
    lines += [(each.start, f"DELETE until {each.end - begin:.3f}: {each.fate}") for each in history.deletions]
    for start, line in sorted(lines):
        print(f"{start - begin:7.3f} {line}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="the one to replay; without it, --histories are run from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--without", choices=MUTATIONS, help="the safeguard to take away")
    options = parser.parse_args()
    profile = MUTATIONS[options.without] if options.without else Profile()
    with tempfile.TemporaryDirectory() as directory:
        async with EmbeddedRedis(Path(directory)) as server, open_lab(server.url) as lab:
            if options.seed is not None:
                await lab.load_scripts(profile)
                with patched(profile):
                    history, problems = await lab.run_one(options.seed, profile)
                tell(history)
                print("\n".join(problems) or "no violation")
                return bool(problems)
            begin = time.monotonic()
            report = await lab.run(range(options.first, options.first + options.histories), profile)
            print(report, f"{time.monotonic() - begin:.1f} s", *report.violations.items(), sep="\n")
            return bool(report.violations)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
