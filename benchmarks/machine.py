"""The machine a benchmark ran on, and its measured ceiling: how fast memory can be read.

Every script of this folder prints this first, because a rate means little without the roof above it: decoding reads
all weights once a token, so tokens/s can not pass bandwidth / bytes a token. Knows nothing of engines.
Read next: `engines.py`.

    python benchmarks/machine.py [--threads 2] [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["describe", "markdown", "physical_cores", "read_bandwidth", "source_tree"]

ISA_FLAGS = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
BANDWIDTH_BYTES = 512 << 20  # far past any last-level cache of a desktop part


def _cpuinfo() -> list[dict[str, str]]:
    """One dict of `key: value` lines for each processor of /proc/cpuinfo (empty elsewhere than on Linux)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return []
    processors = []
    for paragraph in path.read_text().strip().split("\n\n"):
        pairs = (line.split(":", 1) for line in paragraph.splitlines() if ":" in line)
        processors.append({key.strip(): value.strip() for key, value in pairs})
    return processors


def physical_cores() -> int:
    """Physical cores among the processors this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for processor in _cpuinfo():
        number = int(processor.get("processor", -1))
        if number in allowed:
            cores.add((processor.get("physical id", "0"), processor.get("core id", str(number))))
    return len(cores) or len(allowed)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _last_level_cache() -> str:
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return caches[-1].read_text().strip() if caches else "unknown"


def _numpy_bandwidth(threads: int, nbytes: int, repeats: int) -> float:
    """Bytes a second of parallel NumPy reductions, the best of `repeats`: a lower bound of the true bandwidth."""
    values = np.ones(nbytes // 8, dtype=np.int64)
    parts = np.array_split(values, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for reduction in (np.maximum.reduce, np.add.reduce, np.bitwise_or.reduce):
            for _ in range(max(1, repeats // 2)):
                start = time.perf_counter()
                list(pool.map(reduction, parts))
                best = max(best, values.nbytes / (time.perf_counter() - start))
    return best


def source_tree() -> Path | None:
    """The `src` folder beside this one, if the extension was built into it; else the installed package is meant."""
    source = Path(__file__).resolve().parent.parent / "src"
    return source if any((source / "cutaway").glob("_native*")) else None


def read_bandwidth(threads: int, nbytes: int = BANDWIDTH_BYTES, repeats: int = 6) -> tuple[float, str]:
    """Best read rate of `threads` threads over `nbytes` of memory.

    Units: bytes a second. Gives back (rate, how it was measured); without Cutaway's native extension NumPy
    reductions stand in, which stay below the true rate, and the method's name says so.
    """
    source = str(source_tree() or "")
    if source and source not in sys.path:
        sys.path.insert(0, source)
    try:
        from cutaway.forward import native

        return float(native.read_bandwidth(threads, nbytes, repeats)), "native read-only stream"
    except ImportError:
        return _numpy_bandwidth(threads, nbytes, repeats), "NumPy reductions (a stand-in: a lower bound)"


@functools.cache
def describe(threads: int) -> dict[str, Any]:
    """Everything about this machine that a reader of a rate needs. Bandwidth is measured now, at 1 and `threads`."""
    processors = _cpuinfo()
    first = processors[0] if processors else {}
    flags = set(first.get("flags", "").split())
    rates, method = {}, ""
    for count in sorted({1, threads}):
        rates[str(count)], method = read_bandwidth(count)
    family = ", ".join(f"{key} {first[key]}" for key in ("cpu family", "model", "stepping") if key in first)
    return {
        "cpu": first.get("model name", platform.processor() or platform.machine()),
        "cpu_family": family,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "logical_cpus": os.cpu_count(),
        "physical_cores": physical_cores(),
        "last_level_cache": _last_level_cache(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "read_bandwidth": rates,
        "read_bandwidth_method": method,
    }


def markdown(machine: dict[str, Any]) -> str:
    """The description as a few lines of Markdown."""
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s by {n} thread(s)" for n, rate in machine["read_bandwidth"].items())
    lines = [
        f"- CPU: {machine['cpu']} ({machine['cpu_family']}), {machine['physical_cores']} physical cores, "
        f"{machine['logical_cpus']} logical, last-level cache {machine['last_level_cache']}",
        f"- instruction sets: {' '.join(machine['isa'])}",
        f"- memory: {machine['memory_bytes'] / 2**30:.1f} GiB; read bandwidth measured: {rates} "
        f"[{machine['read_bandwidth_method']}]",
        f"- system: {machine['system']}, Python {machine['python']}; load average before the run: "
        f"{machine['load_average']:.2f}",
    ]
    if machine["load_average"] > 0.5:
        lines.append("- **the machine was not idle: take these rates as lower bounds and only ratios seriously**")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="describe this machine and measure its read bandwidth")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    machine = describe(args.threads)
    print(json.dumps(machine, indent=2) if args.json else markdown(machine))


if __name__ == "__main__":
    main()
