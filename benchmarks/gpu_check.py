"""Whether a GPU computes the same as the CPU, and what adapting costs there: `acclimate bench gpu` with its options.

python benchmarks/gpu_check.py [--repeats 40] [--batches 10] [--json FILE]
"""

import sys

from acclimate_service.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gpu", *sys.argv[1:]]))
