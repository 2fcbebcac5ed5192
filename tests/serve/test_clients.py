"""The official `openai` package, unmodified, against the server. The tiny model speaks nonsense: only forms are tested."""

import json

import pytest

from .losses import a_rank_is_lost_in_the_end
from .process import Server

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180), pytest.mark.leaks("one server for the tests of this module")]

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PLACE}}]


@pytest.fixture(scope="module")
def server():
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with Server(MODEL, "-pp", "2", "--dtype", "float32", *tools) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=90, max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_streaming(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens <= 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop")


def test_completions_with_logprobs(client):
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=3, temperature=0, seed=1)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(logprobs.top_logprobs)  # keyed by text, and several of this model's bytes look alike


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)


def test_structured_output(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=200, response_format=form)
    person = json.loads(answer.choices[0].message.content, strict=False)  # nonsense may hold control bytes
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client, choice):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments, strict=False)) == {"city"}


def test_errors_are_the_packages_own(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)


def test_z_streams_end_whole_when_a_rank_is_lost_in_a_drain(server):
    """Last in this module: it ends the server, which no other test needs any more. The other ways are in test_losses.py."""
    a_rank_is_lost_in_the_end(server, 1, drain_first=True)
