"""The formula: even cohorts through stages without overheads, computed without processes. Pure.

Step i ends on stage s at C(i, s) = max(C(i - 1, s), C(i, s - 1)) + t_s(i): a stage takes steps in order, each when its
former stage has ended it. C(i, -1) is when the cohort of the step is ready: its former step has ended on the last
stage, its first member has come, or, after a mere portion of a prompt, its former step has ended on the first stage.
"""

import heapq
from collections.abc import Sequence

from async_pp.bench.pipeline.cohorts import divide
from async_pp.bench.pipeline.loads import Load, Section
from async_pp.bench.pipeline.measured import Answered, Measured
from async_pp.ranks.sleeping_runner import StageTime


def compute(load: Load, stages: Sequence[StageTime]) -> Measured:
    """When each token of a load would come."""
    return Measured([_section(section, stages) for section in load.sections])


def _section(section: Section, stages: Sequence[StageTime]) -> Answered:
    members, cohorts = divide(section, len(stages))
    ended_s = [0.0] * len(stages)
    ready = [(at_s, index) for index, cohort in enumerate(cohorts) if (at_s := cohort.next_arrival_s()) is not None]
    heapq.heapify(ready)
    while ready:
        now_s, index = heapq.heappop(ready)
        step = cohorts[index].plan(now_s)
        if step is not None:
            for stage, time in enumerate(stages):
                now_s = ended_s[stage] = max(ended_s[stage], now_s) + time.of(step.sequences, step.tokens)
            cohorts[index].settle(now_s)
            if not cohorts[index].waits:
                now_s = ended_s[0]
        if (at_s := cohorts[index].next_arrival_s()) is not None:
            heapq.heappush(ready, (max(now_s, at_s), index))
    return Answered(0.0, [member.times_s for member in members])
