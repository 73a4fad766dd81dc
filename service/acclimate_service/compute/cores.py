"""How many cores this process may use, which in a container are fewer than the machine has."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_cores(root: Path = Path("/")) -> int:
    """Cores that the affinity mask allows, and no more whole ones than the quota of any cgroup around this process.

    Threads beyond the quota are worse than useless: the kernel stops all of them for the rest of each period, while the
    others wait for the last one.

    Args:
        root: of the file system that describes the process.

    Returns:
        At least 1.
    """
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affine, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores, of every level of both kinds of cgroups; levels without one are left out."""
    for folder in _folders(root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:  # -1 is no quota either
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue


def _folders(root: Path) -> Iterator[Path]:
    """Folders that may tell a quota: of the process's own cgroup and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        inside = PurePosixPath(path.lstrip("/"))
        yield from (mount / level for level in (inside, *inside.parents))
