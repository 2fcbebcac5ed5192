"""Random LoRA adapters for the tiny model, the same bytes on every machine.

The numbers come from numpy's PCG64, whose stream is fixed by its documentation, so expected tokens made on one machine hold on
another. The spread is large enough that an adapter changes the greedy text of a random model.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

NAMES = {"amber": 1, "cobalt": 2, "crimson": 3}  # name: vLLM's integer id
RANK = 8
TARGETS = ("q_proj", "v_proj", "o_proj")


def make_adapter(directory: Path, model: Path, name: str) -> Path:
    """Write the adapter called name for the Llama model in the folder model; return its folder.

    :raises KeyError: the name is not in NAMES.
    """
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = config.get("head_dim") or hidden // heads
    shapes = {"q_proj": (hidden, heads * head), "v_proj": (hidden, kv_heads * head), "o_proj": (heads * head, hidden)}
    random = np.random.Generator(np.random.PCG64([NAMES[name], zlib.crc32(name.encode())]))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target in TARGETS:
            wide_in, wide_out = shapes[target]
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{stem}.lora_A.weight"] = random.uniform(-0.8, 0.8, (RANK, wide_in)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.uniform(-0.8, 0.8, (wide_out, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "tiny",
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": list(TARGETS),
            },
            indent=2,
        )
    )
    return folder
