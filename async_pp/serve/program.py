"""The order of a start, from the command line to the exit code.

    help? ── preflight ── environment ── zygote ── import vLLM ── parse ── configure ── event loop ── lifecycle
             exit 1 here: nothing      └ imports vLLM beside ours; ranks are forked from it later
             was started

Before the event loop everything is plain synchronous code, and a signal simply ends the process: all there is to end is
the zygote, which ends with us.
"""

import asyncio
import os
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic

from async_pp.errors import ConfigError
from async_pp.ranks.environment import PRELOAD, rank_environment
from async_pp.ranks.spawn import Zygote
from async_pp.serve import environment, helptext, loop, preflight, signals
from async_pp.serve.display import Display
from async_pp.serve.lifecycle import END_DEADLINE_S, EXIT_CONFIG, EXIT_OK, live
from async_pp.serve.preflight import Preflight


def main(argv: Sequence[str]) -> int:
    """Run the server a command line asks for. Returns the exit code: 0 ended cleanly, 1 bad input, 3 engine failed."""
    show = Display()
    try:
        topic = helptext.asked_for(argv)
        if topic is not None:
            print(helptext.text(topic), end="")
            return EXIT_OK
        return _run(argv, show)
    except ConfigError as error:
        if "--verbose" in argv:
            traceback.print_exception(error)
        show.error(str(error))
        return EXIT_CONFIG


def _run(argv: Sequence[str], show: Display) -> int:
    with ExitStack() as stack:
        known = preflight.check(argv, os.environ)
        stack.callback(known.close)
        signals.before_the_loop(show.line, known.close)
        os.environ.update(environment.missing(environment.defaults(known), os.environ))
        zygote = _launch_zygote(known.world_size)
        stack.callback(lambda: asyncio.run(zygote.close()))  # the engine has closed it already, if it came that far
        return _with_vllm(argv, known, zygote, show)


def _launch_zygote(ranks: int) -> Zygote:
    zygote = Zygote()
    zygote.launch(rank_environment(ranks), PRELOAD)
    return zygote


def _with_vllm(argv: Sequence[str], known: Preflight, zygote: Zygote, show: Display) -> int:
    model = _embedded_model(known, show)
    began = monotonic()
    from async_pp.engine.vllm_seam import version

    version.check()
    from async_pp.serve import application, flags

    show.phase("import", None, monotonic() - began)
    args = flags.parse(argv)
    engine_args = application.configure(args, known, model)
    engine = application.make_engine(args, engine_args, zygote, show)
    service = application.make_service(args, engine, known, show)

    async def run() -> int:
        deadline_s = END_DEADLINE_S + service.drain_s

        def at_once() -> None:
            engine.shutdown()
            known.close()

        stop = signals.StopRequest(deadline_s=deadline_s, at_once=at_once, tell=show.line)
        with stop.installed():
            return await live(service, known.listener, stop, show)

    with asyncio.Runner(loop_factory=loop.fast if known.uvloop else loop.stock) as runner:
        return runner.run(run())


def _embedded_model(known: Preflight, show: Display) -> str | None:
    """The folder of the embedded model that is wanted, made if need be; None when another model is."""
    if known.model not in (None, *preflight.EMBEDDED):
        return None
    from async_pp.models import resolve_model

    began = monotonic()
    path = resolve_model(known.model)
    show.phase("model", None, monotonic() - began)
    return str(path)
