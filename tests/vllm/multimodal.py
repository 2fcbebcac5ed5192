"""A random model that sees: BLIP-2's encoder and query former, tiny, in front of the tiny random Llama, for tests.

BLIP-2 because its code in vLLM, unlike that of most models that see, needs no torchvision, and can be cut into stages.
"""

import json
from pathlib import Path
from typing import Any

from tests.vllm.engines import tiny

PIXELS = 28  # of each side of every image, in four patches
IMAGE_TOKENS = 4  # that each image takes in a prompt


def make_blip2(folder: Path, layers: int = 4) -> Path:
    """Write a random BLIP-2 with that many language layers and the tiny model's tokenizer; return its folder."""
    import torch
    from transformers import (
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        LlamaConfig,
    )

    text = json.loads((tiny() / "config.json").read_text()) | {"num_hidden_layers": layers}
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**small, image_size=PIXELS, patch_size=14),
        qformer_config=Blip2QFormerConfig(**small),
        text_config=LlamaConfig(**text),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    for values in model.parameters():  # spread as widely as the tiny model's: every patch changes the text
        if values.dim() > 1:
            torch.nn.init.normal_(values, std=text["initializer_range"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": PIXELS, "width": PIXELS}
    _write(folder / "preprocessor_config.json", {"image_processor_type": "BlipImageProcessor", "size": size})
    _write(folder / "processor_config.json", {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS})
    return folder


def seeing(text: str, shade: int) -> dict[str, Any]:
    """Return a prompt that asks about an image; another shade (0 to 255), another image."""
    from PIL import Image

    image = Image.linear_gradient("L").point(lambda value: (value + shade) % 256).convert("RGB")
    return {"prompt": text, "multi_modal_data": {"image": image}}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
