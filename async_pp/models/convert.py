"""GGUF to safetensors: run as a script, `convert.py GGUF OUT`, in a process of its own.

Knows nothing of this package, so that it starts with torch and transformers alone. Says its stages as JSON lines
({"stage": text}, at the end perhaps {"failure": text}) on stdout. Ends at once when its stdin ends: then its parent is
gone, and nobody will want the result.
"""

import json
import os
import sys
import threading
from pathlib import Path

_MAX_TOKENS = 8192


def _say(**what: str) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201  stdout is this script's interface


def _end_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(2)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def convert(gguf: Path, out: Path) -> None:
    """Write the model, its tokenizer, chat template and generation settings to `out`."""
    _say(stage="loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _say(stage="converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = _MAX_TOKENS
    _say(stage="unpacking 272 tensors of 4-bit weights to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    _say(stage="writing safetensors")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Convert, and turn any failure into one line."""
    _end_with_parent()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ImportError as error:
        _say(failure=f"the package {error.name or error} is missing; install async_pp[cpu]")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  the parent reports it, whatever it was
        _say(failure=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")
        sys.exit(1)


if __name__ == "__main__":
    main()
