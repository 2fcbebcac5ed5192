"""The tiny model loads, speaks deterministically and its tokenizer round-trips every text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_pp.errors import ConfigError
from async_pp.models import ensure_tiny, resolve_model, tiny_recipe
from async_pp.models.manifest import sha256_of
from async_pp.models.progress import Silent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny(tmp_path_factory.mktemp("cache"), layers=3, progress=Silent())


def test_every_machine_makes_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    again = ensure_tiny(tmp_path, layers=3, progress=Silent())
    assert sha256_of(again / "model.safetensors") == sha256_of(tiny / "model.safetensors")
    assert tiny.name == "tiny-3-layers"


@pytest.mark.parametrize("layers", [0, -1, 257])
def test_impossible_layers_are_a_config_error(layers: int) -> None:
    with pytest.raises(ConfigError, match="1 to 256 layers"):
        tiny_recipe(layers)


def test_names(tmp_path: Path) -> None:
    assert resolve_model("some/repo", cache_dir=tmp_path) == "some/repo"
    assert resolve_model("./tiny", cache_dir=tmp_path) == "./tiny"
    assert resolve_model("tiny", cache_dir=tmp_path, progress=Silent()) == tmp_path / "models" / "tiny-8-layers"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips(tiny: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    if any(special in text for special in ("<|bos|>", "<|eos|>", "<|pad|>")):
        return
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# In a process of its own: torch and transformers would stay in the memory of the whole test run.
_LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
text = tokenizer.decode(tokenizer("h\\u00e9llo")["input_ids"])
inputs = torch.tensor([[0, 70, 71], [0, 70, 72]])
tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12).tolist()
print(json.dumps({"layers": model.config.num_hidden_layers, "dtype": str(model.dtype), "chat": chat, "text": text,
                  "tokens": tokens, "missing": sorted(map(str, info["missing_keys"])),
                  "surplus": sorted(map(str, info["unexpected_keys"])), "limit": tokenizer.model_max_length}))
"""


def test_transformers_loads_it_and_its_text_depends_on_the_prompt(tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tiny)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["missing"] == said["surplus"] == []
    assert (said["layers"], said["dtype"], said["limit"]) == (3, "torch.float32", 4096)
    assert said["chat"] == "<|bos|>user\nhi<|eos|><|bos|>assistant\n"
    assert said["text"] == "héllo"
    first, second = (tokens[3:] for tokens in said["tokens"])
    assert first != second
    assert len(set(first)) > 4
