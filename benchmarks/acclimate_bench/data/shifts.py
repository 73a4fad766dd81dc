"""All shifts of the benchmark, whichever data they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate_bench.data.digits import DIGITS, check_digits, load_digits
from acclimate_bench.data.fashion import FASHION, check_fashion, load_fashion
from acclimate_bench.data.shift import Shift

SHIFTS = FASHION + DIGITS


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the data lie."""

    fashion: Path
    digits: Path

    def check(self, shifts: Sequence[str]) -> None:
        """Look for everything that these shifts need, before any of them is run; raises BenchError."""
        if fashion := [shift for shift in shifts if shift in FASHION]:
            check_fashion(self.fashion, fashion)
        if digits := [shift for shift in shifts if shift in DIGITS]:
            check_digits(self.digits, digits)

    def load(self, shift: str) -> Shift:
        """Read one shift; raises BenchError if something is missing or wrong."""
        return load_digits(self.digits, shift) if shift in DIGITS else load_fashion(self.fashion, shift)
