"""What the kernel says about the processes of a server: CPU time, resident memory, names.

CPU time counts in ticks of 10 ms per process. Resident memory of several processes is a plain sum: pages that they
share count once in each of them, so ranks forked from one process look larger than they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Use:
    """One process at one moment: CPU seconds (user and system) since its start, resident bytes."""

    name: str
    cpu_s: float
    rss_bytes: int


Sample = Mapping[int, Use]
"""By process id, parents before their children."""


def take(processes: Iterable[psutil.Process]) -> Sample:
    """Look at each process. Those that have ended are left out."""
    found: dict[int, Use] = {}
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                name = name_of(process.cmdline(), process.name())
                found[process.pid] = Use(name, times.user + times.system, process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def cpu_s(before: Sample, after: Sample) -> float:
    """CPU seconds used between two samples; a process that is new in `after` counts from its start."""
    return sum(use.cpu_s - _cpu_before(pid, before) for pid, use in after.items())


def rss_mib(sample: Sample) -> float:
    """Resident memory of all processes, MiB."""
    return sum(use.rss_bytes for use in sample.values()) / 2**20


def percent_by_name(before: Sample, after: Sample, seconds: float) -> dict[str, float]:
    """CPU use of each process over `seconds`, percent of one core. The second of a name is called "NAME 2"."""
    seen: Counter[str] = Counter()
    percents = {}
    for pid, use in after.items():
        seen[use.name] += 1
        name = use.name if seen[use.name] == 1 else f"{use.name} {seen[use.name]}"
        percents[name] = 100 * (use.cpu_s - _cpu_before(pid, before)) / seconds
    return percents


def name_of(cmdline: Sequence[str], fallback: str) -> str:
    """What to call a process: the Python module it runs, else the title it gave itself, else its executable."""
    line = " ".join(cmdline).strip()
    if "-m" in cmdline[:-1]:
        return cmdline[cmdline.index("-m") + 1]
    if "multiprocessing.resource_tracker" in line:
        return "multiprocessing.resource_tracker"
    if not line or cmdline[0].startswith("/") or "-c" in cmdline:
        return fallback
    return line


def _cpu_before(pid: int, before: Sample) -> float:
    return before[pid].cpu_s if pid in before else 0.0
