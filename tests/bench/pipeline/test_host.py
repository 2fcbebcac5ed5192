"""What steps cost the host: each is counted with the load that it belongs to, on both sides."""

from types import SimpleNamespace

from async_pp.bench.pipeline.host import Watched, Written, timed
from async_pp.bench.pipeline.measured import Answered, Hosted, Measured, figures
from async_pp.core.fit import Size
from async_pp.core.policy import FillFirst


def test_steps_whose_times_come_late_are_of_no_later_load():
    policy = Watched(FillFirst())

    def settle(times):
        for _ in range(times):
            policy.settled(1, 0, 0.0)

    def tell(*seconds):
        for each in seconds:
            policy.timed(Size(2, 2), [0.01], 0.0, each)

    settle(3)
    tell(0.1, 0.2)
    assert policy.take() == [Hosted(2, 0.1), Hosted(2, 0.2)]
    tell(0.3)
    settle(1)
    tell(0.4)
    assert policy.take() == [Hosted(2, 0.4)]
    assert policy.name == "fill-first"


class Scheduler:
    """vLLM's, as far as it matters here."""

    def __init__(self, sizes):
        self.sizes = list(sizes)

    def schedule(self):
        size = self.sizes.pop(0)
        return SimpleNamespace(total_num_scheduled_tokens=size, num_scheduled_tokens=dict.fromkeys(range(size), 1))

    def update_from_output(self, scheduler_output, output):
        return output


def test_a_timed_scheduler_writes_its_steps_and_not_the_empty_ones(tmp_path):
    scheduler = timed(Scheduler, tmp_path / "host")([3, 0, 2, 1])
    written = Written(tmp_path / "host")
    assert written.take() == []
    first, empty, second = (scheduler.schedule() for _ in range(3))
    assert [scheduler.update_from_output(step, "told") for step in (first, empty)] == ["told"] * 2
    scheduler.update_from_output(second, None)
    taken = written.take()
    assert [step.sequences for step in taken] == [3, 2] and all(step.seconds > 0 for step in taken)
    scheduler.update_from_output(scheduler.schedule(), None)
    assert [step.sequences for step in written.take()] == [1]


def test_the_figure_is_of_the_steps_of_the_usual_size():
    measured = Measured(
        [Answered(0.0, [[1.0]])], hosted=[Hosted(1, 9.0), Hosted(4, 0.001), Hosted(4, 0.003), Hosted(4, 0.002)]
    )
    found = figures([(SimpleNamespace(kind="request", at_s=0.0),)], measured)
    assert (found.host_ms_p50, found.host_sequences) == (2.0, 4)
