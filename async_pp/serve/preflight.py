"""Checks that need no vLLM: they answer within milliseconds and before any process is started.

They refuse only what is certainly wrong (a folder that is not there, more stages than layers, a port in use); whatever
is uncertain is left to vLLM's own, slower word. The listening address is not merely tested but taken: the socket
is bound here and handed to the HTTP server later, so nobody can take it while the model loads.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_pp.errors import ConfigError
from async_pp.serve import catalogue, support
from async_pp.serve.flags import CHANGED_DEFAULTS, DRAIN_S, drain_s, light_parse

DEFAULT_PORT = 8000
EMBEDDED = ("default", "tiny")
"""Model names that `async_pp.models` makes on this machine."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TLS_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
_KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Preflight:
    """What is known before vLLM is imported. Owns `listener` until it is handed on."""

    given: Mapping[str, Any]
    model: str | None
    listener: socket.socket
    address: str
    world_size: int
    verbose: bool = False
    uvloop: bool = True
    unix_path: Path | None = field(default=None)
    drain_s: float = DRAIN_S

    @property
    def local_model(self) -> bool:
        """The model lies in a folder on this machine (or is made here)."""
        return self.model is None or self.model in EMBEDDED or Path(self.model).expanduser().exists()

    def close(self) -> None:
        """Give the address back. Idempotent."""
        self.listener.close()
        if self.unix_path is not None:
            with suppress(FileNotFoundError):
                self.unix_path.unlink()


def check(argv: Sequence[str], environment: Mapping[str, str]) -> Preflight:
    """Check a command line and take its address.

    Raises:
        ConfigError: it cannot work; one line says what to change. Nothing is left behind.
    """
    given = light_parse(argv, catalogue.load())
    support.check(given)
    drained_s = drain_s(given)
    stages = _at_least_one(given, "pipeline_parallel_size", "--pipeline-parallel-size")
    shards = _at_least_one(given, "tensor_parallel_size", "--tensor-parallel-size")
    model = given.get("model_tag") or given.get("model")
    if model is not None and model not in EMBEDDED:
        check_model(model, stages, given, environment)
    check_transfer(str(given.get("kv_transfer_config", "")))
    for name in _TLS_FILES:
        if given.get(name) and not Path(given[name]).is_file():
            raise ConfigError(f"--{name.replace('_', '-')}: no such file: {given[name]}")
    unix_path = Path(given["uds"]) if given.get("uds") else None
    if unix_path is not None:
        listener, address = bind_unix(unix_path), f"unix:{unix_path}"
    else:
        host = given.get("host") or CHANGED_DEFAULTS["host"] or ""
        listener = bind(host, given.get("port", DEFAULT_PORT))
        address = url(host, listener.getsockname()[1], tls=bool(given.get("ssl_certfile")))
    return Preflight(
        given=given,
        model=model,
        listener=listener,
        address=address,
        world_size=stages * shards,
        verbose=bool(given.get("verbose", False)),
        uvloop=bool(given.get("uvloop", True)),
        unix_path=unix_path,
        drain_s=drained_s,
    )


def _at_least_one(given: Mapping[str, Any], name: str, flag: str) -> int:
    value = int(given.get(name, 1))
    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, not {value}")
    return value


def url(host: str, port: int, *, tls: bool) -> str:
    """The address a client on this machine uses: a wildcard host is reached as 127.0.0.1."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Take a TCP address without listening on it yet.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not an address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A former server's closing connections must not block the port (set), but a second server that starts at the
        # same time must find it taken although nobody listens yet (cleared once bound).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno or 0).lower()
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from error
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Take a Unix socket path. A path left by a server that is gone is taken over; a live one is refused.

    Raises:
        ConfigError: it is in use, is not a socket, or cannot be made.
    """
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(str(path))
            raise ConfigError(f"--uds {path} is in use by another server")
        path.unlink(missing_ok=True)
    elif path.exists():
        raise ConfigError(f"--uds {path} exists and is not a socket: remove it or choose another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return listener


def check_model(model: str, stages: int, given: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse a model that is certainly not there, or that has fewer layers than stages.

    Raises:
        ConfigError: with the path or name that was looked for.
    """
    path = Path(model).expanduser()
    if path.exists():
        config = _config_of(path, given)
    elif "://" in model or environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    elif not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"no such model folder: {model}")
    else:
        config = _hub_config(model, environment)
    layers = layers_of(config)
    if layers is not None and stages > layers and not given.get("hf_overrides"):
        raise ConfigError(f"--pipeline-parallel-size {stages} is greater than the {layers} layers of {model}")


def check_transfer(text: str) -> None:
    """Refuse a KV connector whose role is not said, here or within another one.

    Args:
        text: of --kv-transfer-config. What is no JSON object is left to vLLM's parser.

    Raises:
        ConfigError: with the connector's name.
    """
    try:
        transfer = json.loads(text)
    except ValueError:
        return
    left = [transfer]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        name, role = each.get("kv_connector"), each.get("kv_role")
        if name is not None and role not in _KV_ROLES:
            said = "is missing" if role is None else f"cannot be {role!r}"
            raise ConfigError(f"--kv-transfer-config: kv_role of {name} {said}: give one of {', '.join(_KV_ROLES)}")
        extra = each.get("kv_connector_extra_config")
        inner = extra.get("connectors") if name == "MultiConnector" and isinstance(extra, dict) else None
        left += inner if isinstance(inner, list) else []


def _config_of(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is a file: give the folder that holds the model's config.json")
        return {}
    if not (path / "config.json").is_file():
        if (path / "params.json").is_file() or given.get("hf_config_path"):
            return {}
        raise ConfigError(f"{path} is not a model folder: it has no config.json")
    return _read_config(path / "config.json")


def _hub_config(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The config of a hub model if it is in the local cache, else nothing: vLLM will fetch it, unless offline."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    found = sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    if found:
        return _read_config(found[-1])
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise ConfigError(f"unknown model {name!r}: no such folder, not in {hub}, and HF_HUB_OFFLINE forbids to ask")
    return {}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Number of transformer layers a model's config names, or None when it names none in a known way."""
    text = config.get("text_config")
    source = text if isinstance(text, dict) else config
    return next((int(source[name]) for name in _LAYERS if isinstance(source.get(name), int)), None)
