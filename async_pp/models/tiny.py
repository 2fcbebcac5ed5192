"""A random Llama that is made in a second: for tests, demonstrations and first steps.

Properties that tests rely on: any number of layers, so that any pipeline size can be tried; a byte-level tokenizer, so
that every text is valid and round-trips; float32, so that sums do not depend on how a batch is cut; and weights spread
so widely (0.2 instead of the usual 0.02) that greedy text varies with every token of the prompt: a wrong hidden state
shows at once. Heads and sizes divide by two, for tensor parallelism.

It is written with numpy alone, without torch, and is the same on every machine.
"""

import json
from pathlib import Path
from typing import Any

from async_pp.errors import ConfigError
from async_pp.models.cache import Recipe, Workspace

HIDDEN = 128
INTERMEDIATE = 256
HEAD_DIM = 32
HEADS = 4
KV_HEADS = 2
VOCAB = 320  # 3 special tokens and 256 bytes, filled up to a round size
MAX_TOKENS = 4096
SPREAD = 0.2
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
MAX_LAYERS = 256

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|bos|>' + message['role'] + '\\n' + message['content'] + '<|eos|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|bos|>assistant\\n' }}{%- endif -%}"
)


def tiny_recipe(layers: int = 8) -> Recipe:
    """The recipe of the random model with so many layers (1 to 256).

    Raises:
        ConfigError: `layers` is out of range.
    """
    if not 1 <= layers <= MAX_LAYERS:
        raise ConfigError(f"the tiny model can have 1 to {MAX_LAYERS} layers, not {layers}")
    return Recipe(
        name=f"tiny-{layers}-layers",
        version=1,
        title=f"the tiny random model ({layers} layers)",
        source="random weights, seed 0",
        needed_bytes=8 * (2 * VOCAB * HIDDEN + layers * 4 * HIDDEN * INTERMEDIATE),
        build=lambda workspace: _build(workspace, layers),
    )


def _build(workspace: Workspace, layers: int) -> None:
    workspace.progress.stage(f"making a random model with {layers} layers")
    try:
        _write_weights(workspace.out, layers)
        _write_tokenizer(workspace.out)
    except ImportError as error:
        raise ConfigError(f"the tiny model needs the package {error.name}: install async_pp[cpu]") from error
    _write_json(workspace.out / "config.json", _config(layers))
    _write_json(workspace.out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": SPREAD,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in the order its random numbers are drawn."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        head = f"model.layers.{layer}."
        shapes[head + "input_layernorm.weight"] = (HIDDEN,)
        shapes[head + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[head + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[head + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[head + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[head + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[head + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[head + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[head + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def _write_weights(out: Path, layers: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.Generator(np.random.PCG64(0))
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1  # the norms
        else draw.standard_normal(shape, np.float32) * np.float32(SPREAD)
        for name, shape in _shapes(layers).items()
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def _write_tokenizer(out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    bos, eos, pad = SPECIAL
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "model_max_length": MAX_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
