"""vLLM's statistics loggers, those of the host program kept apart from the engine's work.

vLLM calls them where it hands outputs to the streams; there, what one raises would end every request.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerFactory, StatLoggerManager

Told = Callable[..., None]
"""Calls its first argument with the others, and tells what that raises."""


def make_manager(
    config: VllmConfig, factories: Sequence[StatLoggerFactory], *, defaults: bool, told: Told
) -> StatLoggerManager:
    """vLLM's loggers, behind those of the host.

    Args:
        config: the engine's.
        factories: make those of the host.
        defaults: whether to log to the console as well.
        told: carries out a call of one of them.
    """
    manager = StatLoggerManager(
        vllm_config=config,
        engine_idxs=[0],
        custom_stat_loggers=list(factories),
        enable_default_loggers=defaults,
        client_count=1,
    )
    own = len(factories)
    manager.stat_loggers[:own] = [_Hosted(logger, told) for logger in manager.stat_loggers[:own]]
    manager.log_engine_initialized()
    return manager


class _Hosted(AggregateStatLoggerBase):
    """A logger of the host program. What it raises while the engine works is told, and nothing else happens."""

    def __init__(self, logger: AggregateStatLoggerBase, told: Told) -> None:
        self._logger = logger
        self._told = told

    def record(self, *args: Any, **kwargs: Any) -> None:
        self._told(self._logger.record, *args, **kwargs)

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        self._told(self._logger.record_sleep_state, *args, **kwargs)

    def record_admission_rejection(self, reason: str) -> None:
        self._told(self._logger.record_admission_rejection, reason)

    def log(self) -> None:
        self._logger.log()

    def log_engine_initialized(self) -> None:
        self._logger.log_engine_initialized()
