"""What all systems find around them while they are measured, and what the bench puts back afterwards."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # sleepers are many more than cores: none may be bound to one
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_LOGS": "-torch._library.triton",  # that there is no triton
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries, once per rank
}

QUIET = "vllm"
"""A logger that tells errors only: progress is all there is to see."""


@contextmanager
def measuring() -> Iterator[None]:
    """Set the environment and the logging. Entered before vLLM is imported, which reads both once."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    logger = logging.getLogger(QUIET)
    level = logger.level
    os.environ.update(ENVIRONMENT)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        logger.setLevel(level)


@contextmanager
def private_folder(model: Path, layers: int) -> Iterator[Path]:
    """A folder (mode 0700) for the sockets of one system, with `model` in it: see `with_layers`. Removed at the end."""
    # The prefix is the package's own, so that what checks for its leftovers finds this one too.
    with tempfile.TemporaryDirectory(prefix="async_pp-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with_layers(model, folder / "model", layers)
        yield folder


def with_layers(model: Path, folder: Path, layers: int) -> None:
    """Make a `folder` like `model`, but of so many layers, and without weights: nobody loads them here."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), "utf-8")
