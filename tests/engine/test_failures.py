"""What is said of a loss."""

from async_pp.core.deadlines import Overdue
from async_pp.engine.failures import RUNNING, Failures


def test_a_loss_is_put_down_to_the_step_that_the_rank_was_in_and_not_to_the_one_whose_answer_is_missing() -> None:
    failures = Failures(7)
    failures.phase = RUNNING
    hung = failures.hung(Overdue((2,), 3, 4, True, 10.0), 3.0, waited_s=3.0, stopped=True)
    assert (hung.rank, hung.epoch, hung.step) == (2, 7, 4)
    assert "finished step 3 3.0 s ago, but its answer has not come; its process is stopped" in str(hung)
