"""The questions an orchestrator asks, answered in front of everything else: also during start and drain.

    /startupz         has it started
    /readyz           send it work now
    /livez            is there a point in letting it go on: the loop answers, and steps come to an end
    /health/generate  does a token really come out

Each answers 200 or 503 with the phase and, when it is 503, the reason. vLLM's own /health is none of these: it is the
application's, behind the gate.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from async_pp.serve.asgi import Application, Receive, Scope, Send, answer

Phase = Literal["starting", "serving", "restarting", "draining", "failed"]

GENERATE_DEADLINE_S = 10.0
"""For a token that /health/generate waits for."""
GENERATE_EVERY_S = 5.0
"""At most one token in this time, however often it is asked."""
STALL_S = 120.0
"""A step in flight for so long means that nothing will come of it any more, unless steps may take longer: `stall_s`."""

GENERATE = "/health/generate"
OPEN_PATHS = ("/livez", "/readyz", "/startupz", GENERATE, "/health")
"""What needs no API key."""


def stall_s(step_deadline_s: float | None) -> float:
    """When /livez gives up: well after the engine itself should have noticed a hung rank."""
    return max(STALL_S, 2 * (step_deadline_s or 0.0))


class Stall:
    """For how long the same step has been the oldest in flight, as far as the calls show.

    Args:
        oldest: what is waited for, None when nothing is.
        clock: seconds.
    """

    def __init__(self, oldest: Callable[[], Hashable | None], clock: Callable[[], float]) -> None:
        self._oldest = oldest
        self._clock = clock
        self._seen: Hashable | None = None
        self._since_s = 0.0

    def seconds(self) -> float:
        """Since it was first seen; 0 with nothing in flight. Never more than the truth."""
        oldest, now_s = self._oldest(), self._clock()
        if oldest is None or oldest != self._seen:
            self._seen, self._since_s = oldest, now_s
        return now_s - self._since_s


@dataclass(frozen=True)
class Result:
    """What came of a token asked for: `problem` is None when it came, after `took_s`."""

    at_s: float
    took_s: float
    problem: str | None


class TokenProbe:
    """Generates a token when asked, but one at a time and rarely; in between the latest result is the answer.

    Args:
        generate: generates one token.
        deadline_s: for it.
        every_s: from the begin of one to the begin of the next.
    """

    def __init__(
        self,
        generate: Callable[[], Awaitable[None]],
        *,
        deadline_s: float = GENERATE_DEADLINE_S,
        every_s: float = GENERATE_EVERY_S,
    ) -> None:
        self._generate = generate
        self._deadline_s = deadline_s
        self._every_s = every_s
        self._began_s = 0.0
        self._task: asyncio.Task[Result] | None = None
        self._latest: Result | None = None

    async def ask(self) -> Result:
        """The result of a token of at most `every_s` ago, or of the one that is on its way when there is none yet."""
        now_s = asyncio.get_running_loop().time()
        if self._task is None or (self._task.done() and now_s - self._began_s >= self._every_s):
            self._began_s = now_s
            self._task = asyncio.create_task(self._run(now_s), name="async_pp token probe")
        elif self._latest is not None:
            return self._latest
        return await asyncio.shield(self._task)  # the others wait for it too: a client that leaves does not end it

    async def close(self) -> None:
        """Ask for no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, began_s: float) -> Result:
        problem: str | None = None
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._generate()
        except TimeoutError:
            problem = f"no token within {self._deadline_s:g} s"
        except Exception as error:  # noqa: BLE001 - any of them is the answer
            problem = f"{type(error).__name__}: {error}"
        self._latest = Result(began_s, asyncio.get_running_loop().time() - began_s, problem)
        return self._latest


@dataclass
class Vitals:
    """What the probes are told.

    Attributes:
        phase: of the server, now.
        reason: more words about a phase in which it does not serve.
        stalled_s: for how long a step has been in flight without an end.
        stall_s: how long is too long.
        token: None for as long as there is none, and for a model that does not generate.
    """

    phase: Callable[[], Phase]
    reason: Callable[[], str]
    stalled_s: Callable[[], float]
    stall_s: float = STALL_S
    token: TokenProbe | None = None


class Probes:
    """Answers the probes; everything else goes on to `application`."""

    def __init__(self, application: Application, vitals: Vitals) -> None:
        self._application = application
        self._vitals = vitals
        self._answers: dict[str, Callable[[Send], Awaitable[None]]] = {
            "/livez": self._live,
            "/readyz": self._ready,
            "/startupz": self._started,
            GENERATE: self._token,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        probe = self._answers.get(scope["path"]) if scope["type"] == "http" else None
        if probe is None or scope["method"] not in ("GET", "HEAD"):
            await self._application(scope, receive, send)
        else:
            await probe(send)

    async def _live(self, send: Send) -> None:
        stalled_s = self._vitals.stalled_s()
        if self._vitals.phase() == "failed":
            await self._say(send, self._vitals.reason())
        elif stalled_s > self._vitals.stall_s:
            await self._say(send, f"no step has ended for {stalled_s:.0f} s")
        else:
            await self._say(send)

    async def _ready(self, send: Send) -> None:
        await self._say(send, None if self._vitals.phase() == "serving" else self._vitals.reason())

    async def _started(self, send: Send) -> None:
        await self._say(send, self._vitals.reason() if self._vitals.phase() == "starting" else None)

    async def _token(self, send: Send) -> None:
        if self._vitals.phase() != "serving":
            await self._say(send, self._vitals.reason())
        elif self._vitals.token is None:
            await self._say(send, "this model generates no tokens")
        else:
            result = await self._vitals.token.ask()
            age_s = asyncio.get_running_loop().time() - result.at_s
            await self._say(send, result.problem, took_s=round(result.took_s, 4), age_s=round(age_s, 3))

    async def _say(self, send: Send, problem: str | None = None, **more: float) -> None:
        reason = {} if problem is None else {"reason": problem}
        content = {"phase": self._vitals.phase(), **reason, **more}
        await answer(send, 200 if problem is None else 503, content, [(b"cache-control", b"no-store")])
