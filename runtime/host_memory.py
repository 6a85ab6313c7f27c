"""How much host memory this process may still take: what is free, within the limits of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

# Limit, use and the page cache that is given up first, in version 2 and in version 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int:
    """Return the host memory that this process may take; containers and job schedulers limit it by cgroups."""
    return max(0, min([psutil.virtual_memory().available, *map(_left, _groups())]))


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of those around them, each of which has limits."""
    lines = MEMBERSHIP.read_text(errors="surrogateescape").splitlines() if MEMBERSHIP.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container may see its own group as the root, and a path that is not there.
        root = CGROUPS / "memory" if controllers else CGROUPS
        folder = root / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _left(group: Path) -> float:
    """Return what a cgroup leaves of its limit; infinity without a limit."""
    for limit, used, cache in _FILES:
        try:
            most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
            pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left = float("inf") if most == "max" else int(most) - taken + int(pages.get(cache, 0))
        except (OSError, ValueError):  # no such limit, or a file that a container shows empty
            continue
        return left
    return float("inf")
