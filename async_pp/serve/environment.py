"""Environment variables that this application sets for itself and its ranks, never over the user's own.

Only the server does this; the library leaves the environment alone.
"""

from collections.abc import Mapping

from async_pp.serve.preflight import Preflight

_ASKS_THE_HUB = ("tokenizer", "hf_config_path", "speculative_config", "spec_model", "lora_modules", "default_mm_loras")

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library.triton",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def defaults(preflight: Preflight) -> dict[str, str]:
    """What to set where the user set nothing.

    One machine: rendezvous and gloo stay on loopback, so nothing listens on another interface. No usage reports. No
    look at the hub for a model that is on disk. Unless `--verbose` asks for all of it, vLLM and PyTorch tell errors
    only: what they warn of at each start (no Triton on CPU, options that eager mode ignores) is as it should be here.
    """
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if not preflight.verbose:
        wanted |= _QUIET
    if preflight.local_model and not any(preflight.given.get(name) for name in _ASKS_THE_HUB):
        wanted["HF_HUB_OFFLINE"] = "1"
    return wanted


def missing(wanted: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `wanted` that the user has not set."""
    return {name: value for name, value in wanted.items() if name not in environment}
