"""The models this package can make by itself: a small real one to serve at once, and a tiny random one for tests.

Theory: a model folder is the result of a slow, failing, killable job, and several processes may want it at the same
moment. So each model is a `Recipe`; `ensure` runs it under a file lock into a folder beside the target, writes a
manifest with checksums, and renames the folder into place as its last act. A folder under its final name is therefore
complete, and what a killed run leaves behind is recognised and removed by the next one.

May live here: what turns a name into a model folder. May not: vLLM, and, at import, anything heavy (torch and
transformers are only ever imported in a child process).
"""

from pathlib import Path

from async_pp.models.cache import Recipe, ensure
from async_pp.models.default import default_recipe
from async_pp.models.progress import Progress, StderrProgress
from async_pp.models.tiny import tiny_recipe

__all__ = [
    "Progress",
    "Recipe",
    "StderrProgress",
    "default_recipe",
    "ensure",
    "ensure_default",
    "ensure_tiny",
    "resolve_model",
    "tiny_recipe",
]


def ensure_default(cache_dir: Path | None = None, *, progress: Progress | None = None, verify: bool = False) -> Path:
    """The folder of SmolLM2-135M-Instruct (bfloat16 safetensors, 269 MB), fetched and converted on first use.

    Args:
        cache_dir: where to keep it; by default `cache_root()`.
        progress: told the stages; by default lines on stderr.
        verify: read every byte and compare checksums, instead of sizes and times only (about a second).

    Raises:
        ConfigError: it cannot be made here (no network, no space, a missing package); one line that says what to do.
    """
    return ensure(default_recipe(), cache_dir, progress=progress, verify=verify)


def ensure_tiny(
    cache_dir: Path | None = None, *, layers: int = 8, progress: Progress | None = None, verify: bool = False
) -> Path:
    """The folder of a random Llama (float32, about 1.3 M parameters with 8 layers), made on first use in a second.

    It speaks nonsense, deterministically: for tests and for demonstrations of the pipeline. Arguments and errors as
    for `ensure_default`.
    """
    return ensure(tiny_recipe(layers), cache_dir, progress=progress, verify=verify)


def resolve_model(
    name: str | None, *, cache_dir: Path | None = None, progress: Progress | None = None, verify: bool = False
) -> Path | str:
    """What to load for `name`: None or "default", and "tiny", are made by this package; all else is returned as it is.

    A local folder that is really called "tiny" is reached as "./tiny".
    """
    if name is None or name == "default":
        return ensure_default(cache_dir, progress=progress, verify=verify)
    if name == "tiny":
        return ensure_tiny(cache_dir, progress=progress, verify=verify)
    return name
