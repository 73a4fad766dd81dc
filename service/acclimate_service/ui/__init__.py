"""The dashboard: static pages that ask the interface as any other caller does, with the key that their reader types in.

Nothing is built and nothing comes from elsewhere: plain ES modules, beside `vendor/` as its packages are published.
"""

from pathlib import Path
from typing import Final

FILES: Final = Path(__file__).with_name("static")
PATHS: Final = (
    "/ui",
    *(f"/ui/{file.relative_to(FILES).as_posix()}" for file in sorted(FILES.rglob("*.*")) if file.name != "index.html"),
)
"""Paths of all files; the page itself is `/ui`."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: no code in the page, and nothing of other hosts."""
