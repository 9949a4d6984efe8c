"""The machine and the versions a result was made with, and how much memory is left.

Reads /proc and the control group where they exist; knows no model. Read next: `kv.py`.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cutaway import __version__

__all__ = ["Machine", "Memory", "machine", "memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory: installed, and still available to this process. `source` says who told.

    Available is the smaller of what the kernel could give without swapping and what the control group allows.
    """

    total_bytes: int | None
    available_bytes: int | None
    source: str


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on besides the code."""

    processor: str
    threads: int  # this process may use
    memory: Memory
    system: str
    python: str
    cutaway: str
    versions: dict[str, str]  # of the packages computed with


def _meminfo(path: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _group_room(root: Path) -> int | None:
    """Bytes this control group may still allocate, or None where there is no limit (or no control group)."""
    for limit, used, stat, key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            allowed, current = (root / limit).read_text().strip(), int((root / used).read_text())
            counts = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if allowed == "max" or int(allowed) >= 1 << 60:
            return None
        return max(int(allowed) - current + int(counts.get(key, 0)), 0)  # page cache is given up when asked for
    return None


def memory(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Memory of this machine, as far as it can be known."""
    try:
        fields = _meminfo(proc / "meminfo")
    except OSError:
        return Memory(None, None, "unknown")
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    room = _group_room(group)
    if room is not None and (available is None or room < available):
        return Memory(total, room, "control group")
    return Memory(total, available, "/proc/meminfo")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> Machine:
    """This machine, now."""
    versions = {}
    for package in ("numpy", "tokenizers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=_processor(),
        threads=_threads(),
        memory=memory(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cutaway=__version__,
        versions=versions,
    )
