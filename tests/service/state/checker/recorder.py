"""What sessions observed, by name."""

from collections.abc import Callable

from acclimate_service.state.contract import Observer, Way


class Recorder(Observer):
    """Passes on each event under a short name."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def found(self, status: str) -> None:
        self._note(f"found {status}")

    def wrote(self, way: Way, result: str) -> None:
        self._note(f"{way} {result}")

    def opened(self, stolen: bool) -> None:
        self._note("lease_stolen" if stolen else "lease_taken")

    def replayed(self, entries: int, seconds: float) -> None:
        assert seconds >= 0
        self._note(f"replayed {entries}")

    def snapshot(self, taken: bool, nbytes: int) -> None:
        assert taken == (nbytes > 0)
        self._note("snapshot" if taken else "snapshot_failed")

    def engine_changed(self) -> None:
        self._note("replay_engine_changed")
