"""The surface of vLLM that our seam relies on is as it was when the seam was written.

The source is read, not imported. With ASYNC_PP_VLLM_SOURCE set to the `vllm` folder of another release, the same check says what
moved there; docs/vllm-versions.md is written from it.
"""

from pathlib import Path

import async_pp
from tests.vllm.seam import CONTRACT, assigned, body, functions, moved, tree

OURS = Path(async_pp.__file__).parent
ONLY_WHEN_CONFIGURED = {"_frontend_profiler_worker_name"}  # AsyncLLM makes it only when it profiles the front end


def test_signatures_are_those_the_seam_was_written_for() -> None:
    assert moved(tree(), CONTRACT) == []


def test_the_engine_sets_every_attribute_that_vllms_constructor_sets() -> None:
    theirs = assigned(tree(), "v1/engine/async_llm.py", "AsyncLLM", "__init__")
    assert theirs, "AsyncLLM.__init__ was not found"
    ours = assigned(OURS, "engine/client.py", "AsyncPPEngine", None)
    assert theirs - ours - ONLY_WHEN_CONFIGURED == set()


def test_the_client_answers_every_coroutine_that_async_llm_awaits() -> None:
    source = (tree() / "v1/engine/async_llm.py").read_text()
    called = {word.partition("(")[0] for word in source.split("self.engine_core.")[1:]}
    called = {name for name in called if name.endswith("_async")}
    assert called, "AsyncLLM no longer calls engine_core.*_async"
    client = body(OURS, "engine/core_client.py", "InProcessClient")
    assert client is not None
    assert called - functions(client).keys() == set()


def test_the_check_sees_what_moved(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/thing.py").write_text(
        "class Thing:\n    async def act(self, one, *, two=2):\n        self.kept = one\n"
    )
    want = {("v1/thing.py", "Thing"): {"act": "async one, *, two=", "gone": ""}, ("v1/none.py", ""): {}}
    assert moved(tmp_path, want) == ["v1/thing.py: Thing.gone is missing", "v1/none.py: the module is missing"]
    want = {("v1/thing.py", "Thing"): {"act": "one"}}
    assert moved(tmp_path, want) == ["v1/thing.py: Thing.act(one) is now (async one, *, two=)"]
    assert assigned(tmp_path, "v1/thing.py", "Thing", "act") == {"kept"}
