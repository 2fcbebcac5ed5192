"""When a step begins on a rank with one of vLLM's workers: not before the former stage has handed over."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def executed(**worker: Any) -> tuple[Any, float, float]:
    """A runner that has executed one step, and the times around that."""
    from async_pp.ranks.vllm_runner import VllmRunner

    runner = VllmRunner(1, 2, lambda name: None)

    def execute_model(payload: Any) -> None:
        runner._handovers.arrived_s = payload

    runner.worker = SimpleNamespace(execute_model=execute_model, worker=SimpleNamespace(**worker))
    before = time.monotonic()
    arrived = before + 100
    runner.execute(0.0 if worker.pop("first", False) else arrived)
    return runner, before, arrived


def test_a_step_begins_when_the_call_comes_or_when_the_former_stage_has_handed_over_whichever_is_later() -> None:
    runner, _, arrived = executed()
    assert runner.began_s == arrived
    runner, before, _ = executed(first=True)
    assert before <= runner.began_s <= time.monotonic()


def test_a_worker_that_knows_when_it_began_is_believed() -> None:
    runner, *_ = executed(began_s=4.5)
    assert runner.began_s == 4.5


def test_what_connectors_report_in_a_step_without_sampling_is_not_left_behind() -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from async_pp.ranks.vllm_runner import VllmRunner

    runner = VllmRunner(0, 2, lambda name: None)
    of_vllm = SimpleNamespace(kv_connector_output=KVConnectorOutput(finished_sending={"a"}))
    runner.worker = SimpleNamespace(worker=SimpleNamespace(model_runner=of_vllm))
    output = runner.connector_output(None)
    assert output is not None and output.kv.finished_sending == {"a"} and output.ec is None
    assert runner.connector_output(None) is None, "told once"
