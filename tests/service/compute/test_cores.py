"""How many cores the process may use, by what the kernel says of its cgroups."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from acclimate_service.compute.process import available_cores

MASK = len(os.sched_getaffinity(0))


def describe(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_without_cgroups_the_affinity_mask_decides(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == MASK


def test_the_present_machine_has_at_least_one_core() -> None:
    assert 1 <= available_cores() <= MASK


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 1), ("max 100000", MASK)]
)
def test_a_container_has_the_whole_cores_of_its_quota_and_at_least_one(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"}
    assert available_cores(describe(tmp_path, files)) == cores


def test_a_quota_above_the_affinity_mask_adds_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}
    assert available_cores(describe(tmp_path, files)) == MASK


def test_the_smallest_quota_of_the_cgroups_around_the_process_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "100000 100000\n",
    }
    assert available_cores(describe(tmp_path, files)) == 1


def test_cgroups_of_the_first_version_are_understood(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n2:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(describe(tmp_path, files)) == 1


def test_a_first_version_without_quota_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "2:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(describe(tmp_path, files)) == MASK
