"""The matrix of requests whose tokens must not depend on who runs the pipeline, as data.

Theory: with greedy (or seeded) sampling in float32, splitting a model's layers over ranks changes no arithmetic, so the tokens
of every case equal those of vLLM's own engine with one rank. A case says what is asked and what must be seen to happen (for
example "preemption really happened"), a group says which engine the cases share. Nothing here imports vLLM or torch, and nothing
here runs anything: drive.py does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KV_BYTES = 64 << 20  # key-value cache of every engine started by these tests


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, keyword arguments of SamplingParams, and how the client behaves."""

    prompt: str
    params: Mapping[str, Any]
    lora: str | None = None  # name of an adapter of adapters.py
    abort_after: int | None = None  # tokens after which the client aborts; the expected values hold the full answer
    stream: bool = False  # read deltas and join them, instead of the final output only


@dataclass(frozen=True)
class Case:
    """Waves of requests. The requests of a wave are started at once; a wave starts when the former one has ended."""

    name: str
    waves: tuple[tuple[Ask, ...], ...]
    must: frozenset[str] = frozenset()  # facts to be seen: "preemption", "cached", "stopped", "adapters_differ"


@dataclass(frozen=True)
class Group:
    """Cases that share one engine, and the engine arguments beside model and parallel sizes."""

    name: str
    model: str  # "tiny" or "default", see async_pp.models
    cases: tuple[Case, ...]
    engine_args: Mapping[str, Any] = field(default_factory=dict)


WORDS = (  # noqa: SIM905 - a list of words reads best as words
    "river lantern copper winter orchard signal paper harbour violet engine meadow candle iron thunder garden mirror "
    "pocket ladder silver forest window bottle market summer planet basket needle carpet island button feather anchor"
).split()


def text(seed: int, words: int) -> str:
    """Return a fixed sentence of that many words; another seed, another sentence."""
    return " ".join(WORDS[(seed * 11 + i * i * 5 + i * (seed + 3)) % len(WORDS)] for i in range(words))


def greedy(max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return sampling arguments for exactly max_tokens greedy tokens (unless a stop condition in more ends it)."""
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "kind", "age", "tame"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"json": PERSON}
CHOICE = {"choice": ["yes", "no", "perhaps later"]}


def structured(max_tokens: int, constraint: Mapping[str, Any]) -> dict[str, Any]:
    """Return greedy sampling arguments under a grammar; the grammar ends the answer."""
    return {"temperature": 0.0, "max_tokens": max_tokens, "structured_outputs": dict(constraint)}


PLAIN = Case(
    "plain",
    (tuple(Ask(text(i, 3 + 4 * i), greedy(24 + 8 * i), stream=True) for i in range(4)),),
)
SAMPLES = Case(
    "samples",
    (
        (
            Ask(text(10, 6), {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}),
            Ask(
                text(11, 9),
                {"n": 3, "seed": 1234, "temperature": 0.7, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True},
            ),
            Ask(text(12, 4), {"seed": 5, "temperature": 1.3, "top_k": 40, "max_tokens": 20, "ignore_eos": True}),
        ),
    ),
)
STOP = Case(
    "stop",
    (
        (
            Ask(text(20, 5), greedy(96, stop=list("aeiost"))),
            Ask(text(21, 8), greedy(96, stop=list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), include_stop_str_in_output=True)),
            Ask(text(22, 8), greedy(96, stop=list("0123456789"), min_tokens=4), stream=True),
            Ask(text(23, 8), greedy(96, stop_token_ids=list(range(40, 60)))),
        ),
    ),
    must=frozenset({"stopped"}),
)
LOGPROBS = Case(
    "logprobs",
    (
        (
            Ask(text(30, 5), greedy(12, logprobs=3)),
            Ask(text(31, 7), greedy(8, logprobs=1, prompt_logprobs=2)),
            Ask(text(32, 12), greedy(4, prompt_logprobs=0)),
        ),
    ),
)
JSON = Case(
    "json",
    (
        (
            Ask(text(40, 5), structured(120, JSON_SCHEMA)),
            Ask(text(41, 9), structured(120, JSON_SCHEMA), stream=True),
            Ask(text(42, 9), greedy(30)),
        ),
    ),
)
CHOICES = Case(
    "choice",
    ((*(Ask(text(50 + i, 4 + i), structured(24, CHOICE)) for i in range(3)), Ask(text(54, 3), greedy(20))),),
)
BURST = Case("burst", (tuple(Ask(text(60 + i, 2 + i % 9), greedy(8 + 3 * (i % 8))) for i in range(24)),))
ABORT = Case(
    "abort",
    (
        (
            Ask(text(196, 4), greedy(40)),
            Ask(text(197, 4), greedy(120), abort_after=5, stream=True),
            Ask(text(198, 6), greedy(40)),
            Ask(text(199, 6), greedy(120), abort_after=17, stream=True),
        ),
        (Ask(text(200, 6), greedy(16)),),
    ),
)
CHUNKED = Case(
    "chunked",
    (
        (
            Ask(text(100, 40), greedy(12)),
            Ask(text(101, 3), greedy(30)),
            Ask(text(102, 22), greedy(12, prompt_logprobs=0)),
            Ask(text(103, 65), greedy(12)),
        ),
    ),
)
SHARED = text(110, 30)
PREFIX = Case(
    "prefix",
    (
        (Ask(SHARED + " one", greedy(12)),),
        tuple(Ask(f"{SHARED} {tail}", greedy(12 + i)) for i, tail in enumerate(("two", "three of them", "one", "f"))),
    ),
    must=frozenset({"cached"}),
)
PREEMPTION = Case(
    "preemption",
    (tuple(Ask(text(120 + i, 3 + i % 3), greedy(100 - 3 * i)) for i in range(8)),),
    must=frozenset({"preemption"}),
)
# Plain requests travel alone: vLLM's CPU kernels give a request without an adapter the last adapter's weights when
# another request of its step has one (they index with -1), so its tokens would depend on who shares its steps.
LORA = Case(
    "lora",
    (
        tuple(Ask(text(140, 5), greedy(20)) for _ in range(2)),
        tuple(Ask(text(140, 5), greedy(20), lora=name) for name in ("amber", "cobalt", "amber", "cobalt")),
        (Ask(text(140, 5), greedy(20)),),
    ),
    must=frozenset({"adapters_differ"}),
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of copper.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "What is a pipeline in computing?",
    "Tell me a short story about a fox.",
    "How do bicycles stay upright?",
    "Name the planets of the solar system.",
    "What does a compiler do?",
    "Describe winter in one sentence.",
    "How many legs does a spider have?",
    "Who wrote Hamlet?",
    "Suggest a name for a cat.",
)
CHAT = Case("chat16", (tuple(Ask(question, greedy(64)) for question in QUESTIONS),))

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": KV_BYTES,
    "enable_prefix_caching": False,
    # A random model likes blanks between the tokens of a document; without this it would fill its answer with them.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

BASE = Group("base", "tiny", (PLAIN, SAMPLES, STOP, LOGPROBS, JSON, CHOICES, BURST, ABORT), COMMON)
BUDGET = Group(
    "budget", "tiny", (CHUNKED, PREFIX), COMMON | {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
)
# 13 usable blocks of 32 tokens: three or four of the eight requests fit at their full length, all of them do at first.
PRESSURE = Group(
    "pressure",
    "tiny",
    (PREEMPTION, LORA),
    COMMON
    | {
        "max_model_len": 256,
        "num_gpu_blocks_override": 14,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "max_num_seqs": 8,
    },
)
SMOL = Group("smol", "default", (CHAT,), COMMON)
GROUPS = {group.name: group for group in (BASE, BUDGET, PRESSURE, SMOL)}
