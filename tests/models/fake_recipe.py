"""A program for the tests: makes a recipe whose build can be held at a gate. `fake_recipe.py ROOT hold|go [full]`.

Says "building" when the build has begun, then "made PATH" or "found PATH" at the end; all stages go to stdout too.
"""

import sys
from pathlib import Path
from typing import TextIO

from async_pp.models import Recipe, ensure
from async_pp.models.cache import Workspace

CONTENT = b"weights" * 1000


class Spoken:
    def stage(self, text: str) -> None:
        print(f"stage {text}", flush=True)

    def update(self, done: int, total: int) -> None:
        pass

    def terminal(self) -> TextIO | None:
        return None


def recipe(hold: bool = False, version: int = 1, needed_bytes: int = 0) -> Recipe:
    def build(workspace: Workspace) -> None:
        (workspace.out / "half.bin").write_bytes(CONTENT[:100])
        print("building", flush=True)
        if hold:
            sys.stdin.readline()
        (workspace.out / "half.bin").write_bytes(CONTENT)

    return Recipe("fake", version, "the fake model", "a test", needed_bytes, build)


if __name__ == "__main__":
    print("done", ensure(recipe(sys.argv[2] == "hold"), Path(sys.argv[1]), progress=Spoken()), flush=True)
