"""The command `acclimate`, which can be ended from its first moment on."""

import os
import signal
import threading
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 with one clear message when it cannot."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    from acclimate_service.commands import run  # which takes seconds: torch comes with it

    return run(arguments)


def _end(number: int, _: FrameType | None) -> None:
    """End the process at once, as the kernel does with others than the first of a container, which handles the signal.

    An exception would be lost in whatever is being imported. Before the command is at work, nothing is to be closed.
    """
    os._exit(128 + number)
