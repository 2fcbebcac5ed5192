"""The formula: even cohorts through stages without overheads, computed without processes. Pure.

Step i ends on stage s at C(i, s) = max(C(i - 1, s), C(i, s - 1)) + t_s(i): a stage takes steps in order, each when its
former stage has ended it. C(i, -1) is when the cohort of the step is ready: its former step has ended on the last
stage, its first member has come, or, after a mere portion of a prompt, its former step has ended on the first stage.
"""

from collections.abc import Sequence

from async_pp.bench.cohorts import Step, follow
from async_pp.bench.pipeline.loads import Load, Section, cohorts_of
from async_pp.bench.pipeline.measured import Answered, Measured
from async_pp.ranks.sleeping_runner import StageTime


def compute(load: Load, stages: Sequence[StageTime]) -> Measured:
    """When each token of a load would come."""
    return Measured([_section(section, stages) for section in load.sections])


def _section(section: Section, stages: Sequence[StageTime]) -> Answered:
    ended_s = [0.0] * len(stages)

    def send(now_s: float, step: Step) -> tuple[float, float]:
        for stage, time in enumerate(stages):
            now_s = ended_s[stage] = max(ended_s[stage], now_s) + time.of(step.sequences, step.tokens)
        return ended_s[0], now_s

    members, cohorts = cohorts_of(section, len(stages))
    follow(cohorts, send)
    return Answered(0.0, [member.times_s for member in members])
