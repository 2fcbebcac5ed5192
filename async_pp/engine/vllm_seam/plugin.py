"""A vLLM plugin with one purpose: `--distributed-executor-backend` takes the façade's dotted name with pipelines.

vLLM asks the *value* of that argument whether it supports pipeline parallelism before it resolves a dotted name, and a
string never does. The plugin, which vLLM loads when it makes engine arguments, resolves our name, and only ours, first.
"""

import functools
import pkgutil
from typing import Any

BACKEND = "async_pp.engine.facade.PipelineExecutor"


def register() -> None:
    """Entry point `vllm.general_plugins`. Cheap: the façade is imported only by those who name it."""
    from vllm.engine.arg_utils import EngineArgs

    check = EngineArgs._check_feature_supported  # noqa: SLF001 - vLLM has no hook before this check
    if hasattr(check, "resolves_async_pp"):
        return

    @functools.wraps(check)
    def resolve_then_check(self: Any) -> None:
        if self.distributed_executor_backend == BACKEND:
            self.distributed_executor_backend = pkgutil.resolve_name(BACKEND)
        check(self)

    resolve_then_check.resolves_async_pp = True  # type: ignore[attr-defined]
    EngineArgs._check_feature_supported = resolve_then_check  # noqa: SLF001
