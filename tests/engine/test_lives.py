"""From one epoch to the next, with an engine and epochs that only remember."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from async_pp.core.recovery import Intensity, Recovery
from async_pp.engine.lives import Lives, Loss
from async_pp.errors import RankLost, StartupError


class FakeEpoch:
    """Is lost at once."""

    def __init__(self, owner: "FakeOwner", number: int) -> None:
        self.owner = owner
        self.number = number

    async def start(self) -> None:
        self.owner.did("start", self.number)

    async def run(self) -> Loss:
        self.owner.did("run", self.number)
        return Loss(RankLost(f"loss {self.number}"), 7)

    def leave(self) -> Any:
        self.owner.did("leave", self.number)
        return SimpleNamespace(requests={"r": None}, tokens={"r": 0})

    async def close(self) -> None:
        self.owner.did("close", self.number)


class FakeOwner:
    """Remembers what it is told; raises where it is to."""

    def __init__(self, *, raises: tuple[str, Exception] | None = None) -> None:
        self.story: list[str] = []
        self.dead: tuple[BaseException, int | None, str | None] | None = None
        self._raises = raises

    def did(self, what: str, number: int) -> None:
        self.story.append(f"{what} {number}")
        if self._raises is not None and self._raises[0] == what:
            raise self._raises[1]

    async def make(self, number: int) -> FakeEpoch:
        self.did("make", number)
        return FakeEpoch(self, number)

    def suspend(self, carried: Any) -> None:
        self.story.append("suspend")

    def fail(self, verdict: Any, carried: Any, loss: Loss, epoch: int) -> None:
        self.did("fail", epoch)

    async def resume(self, epoch: FakeEpoch, suspects: Collection[str]) -> None:
        self.did("resume", epoch.number)

    def die(self, error: BaseException, step: int | None, why: str | None = None) -> None:
        self.dead = (error, step, why)


async def lived(owner: FakeOwner, most: int = 1) -> FakeOwner:
    await Lives(owner, FakeEpoch(owner, 0), Recovery("replay", Intensity(most)), lambda: 0.0).run()
    return owner


async def test_a_lost_rank_set_is_left_and_closed_before_the_next_one_is_made() -> None:
    owner = await lived(FakeOwner())
    first = ["run 0", "leave 0", "suspend", "fail 0", "close 0", "make 1", "start 1", "resume 1"]
    assert owner.story == [*first, "run 1", "leave 1", "suspend"]
    assert str(owner.dead[0]).startswith("loss 1")
    assert owner.dead[1:] == (7, "1 restarts within 300 s were not enough")


async def test_a_start_that_fails_counts_as_a_loss() -> None:
    owner = await lived(FakeOwner(raises=("start", StartupError("no memory"))), most=2)
    assert owner.story.count("suspend") == 1, "what was carried over is carried on"
    assert [line for line in owner.story if line.startswith("make")] == ["make 1", "make 2"]
    assert isinstance(owner.dead[0], StartupError)


@pytest.mark.parametrize("what", ["fail", "close", "make", "start", "resume", "run", "leave"])
async def test_what_is_not_known_to_pass_ends_the_engine_instead_of_leaving_it_without_steps(what: str) -> None:
    error = ValueError("list.remove(x): x not in list")
    owner = await lived(FakeOwner(raises=(what, error)))
    assert owner.dead == (error, None, None)
