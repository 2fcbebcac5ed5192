"""vLLM's HTTP application on our engine. Imports vLLM, so it is itself imported late."""

import functools
import logging
import resource
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.entrypoints.launchers.utils.constants import H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils import random_uuid

from async_pp.engine.client import AsyncPPEngine
from async_pp.errors import ConfigError
from async_pp.ranks.spawn import Zygote
from async_pp.serve import defaults, support
from async_pp.serve.asgi import Application
from async_pp.serve.display import Display, curl_line
from async_pp.serve.headers import BoundedHeaders
from async_pp.serve.lifecycle import Service
from async_pp.serve.preflight import Preflight
from async_pp.serve.probes import stall_s

UNFIT = (AttributeError, LookupError, NotImplementedError, RecursionError)
"""What vLLM's routes raise at a body that is nested too deeply, is of another type or lacks what they take for granted,
and at one that asks for what the model does not have. Left to them it is an error of the server's: 501, or 500 and they
hang up."""

log = logging.getLogger(__name__)


def configure(args: Namespace, preflight: Preflight, model: str | None) -> AsyncEngineArgs:
    """Engine arguments from parsed flags, with this server's defaults filled in and the unsupported refused.

    Args:
        args: the namespace of vLLM's parser; filled in, in place.
        preflight: what was known before.
        model: the folder of an embedded model, or None when the user named another one.

    Raises:
        ConfigError: an unsupported feature was asked for.
    """
    support.check(vars(args))
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError("VLLM_USE_RUST_FRONTEND is not supported: unset it, this server brings its own front end")
    defaults.apply(
        args,
        preflight.given,
        model=preflight.model,
        on_cpu=current_platform.is_cpu(),
        fast_bf16=defaults.has_fast_bf16(),
    )
    args.model = model or args.model
    args.api_server_count = None
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    return engine_args


def make_engine(args: Namespace, engine_args: AsyncEngineArgs, zygote: Zygote, show: Display) -> AsyncPPEngine:
    """The engine that the flags ask for, not started."""
    return AsyncPPEngine.from_engine_args(
        engine_args,
        UsageContext.OPENAI_API_SERVER,  # vLLM's defaults for step sizes depend on it
        policy=args.policy,
        on_rank_loss=args.on_rank_loss,
        restarts=args.max_restarts,
        step_deadline_s=args.step_deadline,
        zygote=zygote,
        on_phase=show.phase,
        on_lost=show.lost,
    )


def make_service(args: Namespace, engine: AsyncPPEngine, preflight: Preflight, show: Display) -> Service:
    """Put routes, HTTP settings and engine together. Nothing is started."""
    routes: list[str] = []
    tasks: list[str] = []
    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]

    async def application() -> Application:
        tasks.extend(await engine.get_supported_tasks())
        app = await _application(args, engine)
        routes.append(_route(engine, tasks))
        return app

    def announce() -> None:
        name = args.served_model_name[0] if args.served_model_name else args.model
        curl = curl_line(preflight.address, name, route=routes[0], api_key=bool(keys))
        show.serving(preflight.address, curl)

    return Service(
        engine=engine,
        application=application,
        http=functools.partial(_http_config, args),
        abort_all=functools.partial(abort_all, engine),
        announce=announce,
        beside=functools.partial(_watch_certificates, args),
        drain_s=preflight.drain_s,
        wait_for_restart=args.on_rank_loss == "replay",
        most_open=lambda: _limit(engine),
        keys=keys,
        oldest=lambda: engine.oldest_step,
        stall_s=stall_s(args.step_deadline),
        token=lambda: functools.partial(_one_token, engine) if "generate" in tasks else None,
    )


def _limit(engine: AsyncPPEngine) -> int:
    """How many requests may be open: vLLM's own check gets the same limit, if it has none.

    vLLM looks when a request comes and again when it is added, after the first byte. The gate's count knows no such
    gap, so it is the one that refuses almost all.
    """
    config = engine.scheduler_config
    if config.max_num_queued_reqs is None:
        config.max_num_queued_reqs = defaults.most_requests(config.max_num_seqs)
    limit: int = config.max_num_queued_reqs
    return limit


async def _one_token(engine: AsyncPPEngine) -> None:
    """Let the engine generate a token of no meaning."""
    prompt = {"prompt_token_ids": [1]}
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), f"probe-{random_uuid()}"):
        pass


async def _application(args: Namespace, engine: AsyncPPEngine) -> Application:
    tasks = await engine.get_supported_tasks()
    await engine.reset_mm_cache()  # profiling may have left dummy data in it
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    # vLLM's error handler ends the server it finds here as soon as the engine is dead; ours first lets errors get out.
    app.state.server = SimpleNamespace(should_exit=False)
    for kind in UNFIT:
        app.add_exception_handler(kind, _unfit)
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built it already
    served: Application = app
    return served


async def _unfit(request: Request, error: Exception) -> Response:
    """Answer 400, as vLLM does to what it raises as `ValueError`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    log.warning("%s is refused: %s in %s:%d", request.url.path, type(error).__name__, place.filename, place.lineno)
    answer: Response = await exception_handler(request, ValueError(f"the request cannot be served: {error}"))
    return answer


def _route(engine: AsyncPPEngine, tasks: Collection[str]) -> str:
    """The route to try first: see `display.curl_line`."""
    if "generate" in tasks:
        tokenizer = engine.get_tokenizer() if not engine.model_config.skip_tokenizer_init else None
        return "chat" if getattr(tokenizer, "chat_template", None) else "completions"
    return "embeddings" if "embed" in tasks else "models"


async def abort_all(engine: AsyncPPEngine) -> None:
    """Abort every open request; each stream ends with finish reason "abort"."""
    open_requests = list(engine.output_processor.request_states)
    if open_requests:
        await engine.abort(open_requests, internal=True)


def _http_config(args: Namespace, application: Application) -> uvicorn.Config:
    _raise_open_files()
    more: dict[str, Any] = {}
    if (log_config := get_uvicorn_log_config(args)) is not None:
        more["log_config"] = log_config
    tls: Mapping[str, Any] = {
        name: getattr(args, name)
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    }
    return uvicorn.Config(
        application,
        http=BoundedHeaders,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size or H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT,
        **tls,
        **more,
    )


def _raise_open_files() -> None:
    """Every connection is a file descriptor: allow as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watch_certificates(args: Namespace, config: uvicorn.Config) -> Callable[[], None]:
    if not (args.enable_ssl_refresh and config.ssl):
        return lambda: None
    watcher = SSLCertRefresher(config.ssl, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs)
    stop: Callable[[], None] = watcher.stop
    return stop
