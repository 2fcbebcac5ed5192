"""Whether a process keeps its size: resident memory, descriptors and threads over time."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

EVERY_S = 1.0
"""Between two samples."""

WARM_UP = 0.25
"""Share of the time that does not count: caches and pools fill."""

ALLOWED = 0.02
"""Growth by the fitted line, over the time that counts, by the median size: below it is flat."""


@dataclass(frozen=True)
class Memory:
    """The size of a process over time.

    Attributes:
        first_mib, last_mib: resident after the warm-up and at the end: medians of the first and the last tenth.
        mib_per_minute: least squares, after the warm-up.
        flat: see `ALLOWED`.
        descriptors, threads: after the warm-up and at the end.
    """

    first_mib: float
    last_mib: float
    mib_per_minute: float
    flat: bool
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @classmethod
    def of(cls, samples: Sequence["Sample"]) -> Self:
        """From samples in order of time; at least two after the warm-up."""
        counted = samples[int(WARM_UP * len(samples)) :]
        sizes = [sample.rss_mib for sample in counted]
        slope, _ = statistics.linear_regression([sample.at_s for sample in counted], sizes)
        tenth = max(1, len(sizes) // 10)
        growth = slope * (counted[-1].at_s - counted[0].at_s)
        return cls(
            first_mib=round(statistics.median(sizes[:tenth]), 1),
            last_mib=round(statistics.median(sizes[-tenth:]), 1),
            mib_per_minute=round(60 * slope, 2),
            flat=growth <= ALLOWED * statistics.median(sizes),
            descriptors=(counted[0].descriptors, counted[-1].descriptors),
            threads=(counted[0].threads, counted[-1].threads),
        )


@dataclass(frozen=True)
class Sample:
    """A process at one moment: monotonic seconds, resident MiB, open descriptors, threads."""

    at_s: float
    rss_mib: float
    descriptors: int
    threads: int


async def watch(process: psutil.Process, samples: list[Sample]) -> None:
    """Take samples until it is cancelled."""
    while True:
        with process.oneshot():
            size = process.memory_info().rss / 2**20
            samples.append(Sample(time.monotonic(), size, process.num_fds(), process.num_threads()))
        await asyncio.sleep(EVERY_S)
