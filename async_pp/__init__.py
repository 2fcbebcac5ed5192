"""async_pp: pipeline-parallel serving as coroutines, on vLLM's scheduler and workers.

The names below are loaded on first use: importing the package costs nothing, so that `python -m async_pp.serve --help`
and the rank zygote start before anyone pays for importing vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_pp.engine.client import AsyncPPEngine

__all__ = ["AsyncPPEngine"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "AsyncPPEngine":
        from async_pp.engine.client import AsyncPPEngine

        return AsyncPPEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
