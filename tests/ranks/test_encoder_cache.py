"""No report of an encoder-cache connector is lost between vLLM's runner and the rank's answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from async_pp.ranks.encoder_cache import EncoderCacheReports

pytestmark = pytest.mark.vllm


class Runner:
    """As vLLM's v1 runner on a first stage: it opens the connector around its encoder and drops what that reports."""

    encoder_cache: dict[str, Any] = {}  # noqa: RUF012 - as the real one

    def __init__(self) -> None:
        self.sent: set[str] = set()

    @contextmanager
    def maybe_get_ec_connector_output(self, scheduler_output: Any, encoder_cache: dict[str, Any]) -> Iterator[Any]:
        from vllm.v1.outputs import ECConnectorOutput

        report = ECConnectorOutput()
        try:
            yield report
        finally:
            report.finished_sending, self.sent = self.sent, set()

    def execute(self, sent: set[str]) -> None:
        with self.maybe_get_ec_connector_output(None, encoder_cache=self.encoder_cache):
            self.sent |= sent  # known only when the connector is closed


def watched() -> tuple[Runner, EncoderCacheReports]:
    runner, reports = Runner(), EncoderCacheReports()
    reports.watch(runner)
    return runner, reports


def test_the_report_of_a_step_joins_its_answer_alone_and_not_the_one_that_all_steps_share() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as SHARED

    runner, reports = watched()
    runner.execute({"a"})
    assert reports.attached(SHARED).ec_connector_output.finished_sending == {"a"}
    assert SHARED.ec_connector_output is None
    runner.execute(set())
    assert reports.attached(SHARED) is SHARED


def test_an_answer_that_has_its_report_already_keeps_it() -> None:
    from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

    runner, reports = watched()
    runner.execute({"a"})
    own = ModelRunnerOutput([], {}, ec_connector_output=ECConnectorOutput(finished_recving={"b"}))
    assert reports.attached(own) is own
    assert own.ec_connector_output == ECConnectorOutput(finished_recving={"b"})


def test_a_step_without_tokens_asks_once() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as SHARED

    runner, reports = watched()
    runner.sent = {"late"}
    reports.ask(None)
    runner.sent = {"later"}
    reports.ask(None)
    assert reports.attached(SHARED).ec_connector_output.finished_sending == {"late"}


def test_a_runner_without_such_a_connector_is_left_alone() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as SHARED

    reports = EncoderCacheReports()
    reports.watch(SimpleNamespace())
    reports.ask(None)
    assert reports.attached(SHARED) is SHARED
