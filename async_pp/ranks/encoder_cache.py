"""What a rank's encoder-cache connector reports, on its way into the rank's answers.

vLLM's v1 runner opens the connector around the encoder, on the first stage, but attaches what it reports to answers of
the last stage alone; the first stage's, and all of an instance that only encodes, is dropped. In a step without tokens
it does not even ask. (vLLM's v2 runner loses none of this.) Here the rank keeps the report and attaches it itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any


class EncoderCacheReports:
    """The report of the step at hand, kept until the step's answer is there."""

    def __init__(self) -> None:
        self._runner: Any = None
        self._kept: Any = None  # vLLM's ECConnectorOutput, filled in when the connector is closed

    def watch(self, runner: Any) -> None:
        """Keep what a runner's connector reports from now on. Other runners than vLLM's v1 are left alone.

        Args:
            runner: the model runner of one of vLLM's workers, of the first stage.
        """
        opened = getattr(runner, "maybe_get_ec_connector_output", None)
        if opened is None:
            return
        self._runner = runner

        @contextmanager
        def keeping(*arguments: Any, **named: Any) -> Iterator[Any]:
            with opened(*arguments, **named) as report:
                self._kept = report
                yield report

        runner.maybe_get_ec_connector_output = keeping

    def ask(self, scheduler_output: Any) -> None:
        """After a step without tokens: ask the connector what it has sent and received since, if the runner did not.

        Args:
            scheduler_output: the step, with its metadata for the connector.
        """
        if self._runner is not None and self._kept is None:
            with self._runner.maybe_get_ec_connector_output(scheduler_output, self._runner.encoder_cache):
                pass

    def attached(self, answer: Any) -> Any:
        """The answer with the step's report, which is then forgotten.

        Args:
            answer: vLLM's ModelRunnerOutput. It is not changed: all steps without output share one.
        """
        report, self._kept = self._kept, None
        if report is None or report.is_empty() or answer.ec_connector_output is not None:
            return answer
        answer = copy(answer)
        answer.ec_connector_output = report
        return answer
