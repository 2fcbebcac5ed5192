"""What our seam relies on in vLLM's source, as data, and readers of that source that import nothing of it.

A contract entry names a file below the `vllm` package, a class ("" for the module) and functions with the parameters they have in
the supported release: `name=` has a default, `*` starts keyword-only ones. Reading the source instead of importing it keeps the
check quick and lets it run on a tree of another release.
"""

import ast
import importlib.util
import os
from pathlib import Path

Contract = dict[tuple[str, str], dict[str, str]]

CONTRACT: Contract = {
    ("v1/engine/async_llm.py", "AsyncLLM"): {
        "__init__": "vllm_config, executor_class, log_stats, usage_context=, mm_registry=, log_requests=, start_engine_loop=, stat_loggers=, aggregate_engine_logging=, client_addresses=, client_count=, client_index=, profiler=",
        "from_engine_args": "engine_args, start_engine_loop=, usage_context=, stat_loggers=",
        "add_request": "async request_id, prompt, params, arrival_time=, lora_request=, tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, session_id=, prompt_text=, reasoning_ended=, reasoning_parser_kwargs=, kv_hints=",
        "generate": "async prompt, sampling_params, request_id, *, prompt_text=, lora_request=, tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, session_id=, kv_hints=, reasoning_ended=, reasoning_parser_kwargs=",
        "encode": "async prompt, pooling_params, request_id, lora_request=, trace_headers=, priority=, tokenization_kwargs=, reasoning_ended=",
        "abort": "async request_id, internal=",
        "get_supported_tasks": "async ",
        "check_health": "async ",
        "shutdown": "timeout=",
        "_run_output_handler": "",
        "pause_generation": "async *, mode=, clear_cache=",
        "resume_generation": "async ",
        "start_profile": "async profile_prefix=, *, delay_iterations=, max_iterations=",
        "stop_profile": "async ",
        "sleep": "async level=, mode=",
        "wake_up": "async tags=",
        "reset_prefix_cache": "async reset_running_requests=, reset_connector=",
        "collective_rpc": "async method, timeout=, args=, kwargs=",
    },
    ("v1/engine/core_client.py", "EngineCoreClient"): {
        "get_output_async": "async ",
        "get_supported_tasks_async": "async ",
        "add_request_async": "async request",
        "abort_requests_async": "async request_ids",
        "profile_async": "async is_start=, profile_prefix=, delay_iterations=, max_iterations=",
        "reset_mm_cache_async": "async ",
        "reset_prefix_cache_async": "async reset_running_requests=, reset_connector=",
        "reset_encoder_cache_async": "async ",
        "sleep_async": "async level=, mode=",
        "release_kv_cache_memory_async": "async ",
        "wake_up_async": "async tags=",
        "is_sleeping_async": "async ",
        "add_lora_async": "async lora_request",
        "remove_lora_async": "async lora_id",
        "list_loras_async": "async ",
        "pin_lora_async": "async lora_id",
        "save_sharded_state_async": "async path, pattern=, max_size=",
        "collective_rpc_async": "async method, timeout=, args=, kwargs=",
        "execute_dummy_batch_async": "async ",
        "set_weight_version_async": "async weight_version",
        "get_weight_version_async": "async ",
        "shutdown": "timeout=",
        "dp_engines_running": "",
    },
    ("v1/engine/core_client.py", "AsyncMPClient"): {
        "pause_scheduler_async": "async mode=, clear_cache=",
        "resume_scheduler_async": "async ",
        "is_scheduler_paused_async": "async ",
    },
    ("v1/engine/core.py", "EngineCore"): {
        "__init__": "vllm_config, executor_class, log_stats, executor_fail_callback=, include_finished_set=",
        "preprocess_add_request": "request",
        "add_request": "request, request_wave=",
        "abort_requests": "request_ids",
        "is_scheduler_paused": "",
        "set_weight_version": "weight_version",
        "get_weight_version": "",
        "_attach_weight_version": "outputs",
    },
    ("v1/core/sched/scheduler.py", "Scheduler"): {
        "schedule": "throttle_prefills=",
        "update_from_output": "scheduler_output, model_runner_output",
        "finish_requests": "request_ids, finished_status",
        "add_request": "request",
        "get_grammar_bitmask": "scheduler_output",
        "update_draft_token_ids": "draft_token_ids",
        "update_draft_token_ids_in_output": "draft_token_ids, scheduler_output",
        "set_pause_state": "pause_state",
        "reset_prefix_cache": "reset_running_requests=, reset_connector=",
        "reset_encoder_cache": "",
        "has_finished_requests": "",
        "shutdown": "",
    },
    ("v1/executor/abstract.py", "Executor"): {
        "__init__": "vllm_config",
        "_init_executor": "",
        "get_class": "vllm_config",
        "collective_rpc": "method, timeout=, args=, kwargs=, non_block=",
        "execute_model": "scheduler_output, non_block=",
        "sample_tokens": "grammar_output, non_block=",
        "take_draft_token_ids": "",
        "initialize_from_config": "kv_cache_configs",
        "determine_available_memory": "",
        "get_kv_cache_specs": "",
        "set_kv_cache_layout": "layout_name",
        "get_supported_kv_cache_layouts": "",
        "compile_or_warm_up_model": "",
        "profile": "is_start=, profile_prefix=, *, delay_iterations=, max_iterations=",
        "check_health": "",
        "shutdown": "",
        "supports_async_scheduling": "",
        "register_failure_callback": "callback",
    },
    ("v1/worker/worker_base.py", "WorkerBase"): {
        "__init__": "vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=",
        "init_device": "",
        "load_model": "*, load_dummy_weights=",
        "execute_model": "scheduler_output",
        "sample_tokens": "grammar_output",
        "get_kv_cache_spec": "",
        "set_kv_cache_layout": "kv_cache_layout",
        "compile_or_warm_up_model": "",
        "synchronize_device": "",
        "add_lora": "lora_request",
        "remove_lora": "lora_id",
        "list_loras": "",
        "pin_lora": "lora_id",
        "reset_mm_cache": "",
        "shutdown": "",
    },
    ("v1/worker/worker_base.py", "WorkerWrapperBase"): {
        "__init__": "rpc_rank=, global_rank=",
        "init_worker": "all_kwargs",
        "init_device": "",
        "initialize_from_config": "kv_cache_configs",
        "execute_model": "scheduler_output",
        "shutdown": "",
    },
    ("v1/worker/gpu_worker.py", "Worker"): {
        "__init__": "vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=",
        "load_model": "*, load_dummy_weights=",
        "execute_model": "scheduler_output",
        "sample_tokens": "grammar_output",
        "take_draft_token_ids": "",
        "sleep": "level=",
        "wake_up": "tags=",
        "discard": "tags",
        "profile": "is_start=, profile_prefix=, *, delay_iterations=, max_iterations=",
        "execute_dummy_batch": "",
    },
    ("v1/worker/cpu_worker.py", "CPUWorker"): {
        "__init__": "vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=",
        "init_device": "",
        "determine_available_memory": "",
    },
    ("v1/outputs.py", "AsyncModelRunnerOutput"): {
        "get_output": "",
    },
    ("v1/outputs.py", "KVConnectorOutput"): {
        "is_empty": "",
    },
    ("v1/outputs.py", "ECConnectorOutput"): {
        "is_empty": "",
    },
    ("distributed/kv_transfer/kv_connector/v1/base.py", "KVConnectorBase_V1"): {
        "get_finished_count": "",
        "has_pending_push_work": "",
        "requires_kv_delivery": "",
    },
    ("v1/engine/output_processor.py", "OutputProcessor"): {
        "__init__": "tokenizer, *, log_stats, stream_interval=, tracing_enabled=, admission_stats=",
        "process_outputs": "engine_core_outputs, engine_core_timestamp=, iteration_stats=, weight_version=",
        "abort_requests": "request_ids, internal",
        "propagate_error": "e",
    },
    ("entrypoints/launchers/app.py", ""): {
        "build_app": "args, supported_tasks=, model_config=",
    },
    ("entrypoints/launchers/api_server/entry.py", ""): {
        "build_and_serve": "async engine_client, listen_address, sock, args, peer_loads=, **uvicorn_kwargs",
    },
    ("entrypoints/launchers/api_server/app_state.py", ""): {
        "init_app_state": "async engine_client, state, args, supported_tasks=",
    },
    ("entrypoints/launchers/launcher.py", ""): {
        "serve_http": "async app, sock, enable_ssl_refresh=, peer_loads=, **uvicorn_kwargs",
        "create_server_socket": "addr, *, reuse_port",
        "validate_api_server_args": "args",
    },
    ("entrypoints/launchers/cli_args.py", ""): {
        "make_arg_parser": "parser",
        "validate_parsed_serve_args": "args",
    },
}


def tree() -> Path:
    """Return the vLLM package to read: ASYNC_PP_VLLM_SOURCE, or the installed one (found without importing it)."""
    if source := os.environ.get("ASYNC_PP_VLLM_SOURCE"):
        return Path(source)
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations, "vLLM is not installed"
    return Path(found.submodule_search_locations[0])


def body(root: Path, file: str, name: str) -> list[ast.stmt] | None:
    """Return the statements of a class (or of the module, for the empty name); None when there is no such thing."""
    path = root / file
    if not path.exists():
        return None
    module = ast.parse(path.read_text())
    if not name:
        return module.body
    return next((node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def functions(statements: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions defined directly among the statements, by name."""
    return {node.name: node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters as the contract writes them, without self or cls; coroutines start with `async`."""
    arguments = function.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    first_default = len(names) - len(arguments.defaults)
    parts = [name if i < first_default else f"{name}=" for i, name in enumerate(names)]
    if parts and parts[0] in ("self", "cls"):
        parts = parts[1:]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        argument.arg + ("=" if default is not None else "")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return ("async " if isinstance(function, ast.AsyncFunctionDef) else "") + ", ".join(parts)


def assigned(root: Path, file: str, name: str, method: str | None) -> set[str]:
    """Return the attributes of self that a method assigns; those of all methods, and class attributes, for None."""
    statements = body(root, file, name) or []
    found: set[str] = set()
    nodes: list[ast.AST] = list(statements)
    if method is not None:
        nodes = [functions(statements)[method]]
    else:
        found |= {node.name for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in nodes:
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            ):
                found.add(inner.attr)
    return found


def moved(root: Path, contract: Contract) -> list[str]:
    """Return one line for each function of the contract that is missing or takes other parameters."""
    lines = []
    for (file, name), wanted in contract.items():
        statements = body(root, file, name)
        if statements is None:
            lines.append(f"{file}: {name or 'the module'} is missing")
            continue
        present = functions(statements)
        for function, parameters in wanted.items():
            where = f"{file}: {name + '.' if name else ''}{function}"
            if function not in present:
                lines.append(f"{where} is missing")
            elif (now := signature(present[function])) != parameters:
                lines.append(f"{where}({parameters}) is now ({now})")
    return lines
