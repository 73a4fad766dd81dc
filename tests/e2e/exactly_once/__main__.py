"""Run it from the command line: `python tests/e2e/exactly_once --batches 10000 --seed 7`."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # the package of this folder, however it is started

from exactly_once.run import run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="what is sent and what happens")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--keep", type=Path, help="directory for the database and the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        report = run(options.seed, options.batches, directory)
    print(report)
    return bool(report.verdict.violations)


if __name__ == "__main__":
    sys.exit(main())
