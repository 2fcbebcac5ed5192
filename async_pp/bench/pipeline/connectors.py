"""The KV connector that every rank may have: which one, and in which step a rank reports. Pure.

Nothing is moved. What is measured is the way of the reports: the blocks of a request that has ended are held until
every rank has reported that its part was sent. A rank is told of the end with a step (or, where there is none, with
whatever the engine sends to idle ranks), and reports in that same step, or so many steps later.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from async_pp.errors import ConfigError

Role = Literal["kv_both", "kv_producer", "kv_consumer"]
"""vLLM's `kv_role`. Producers must deliver by default, so each of their steps needs every rank's answer."""

ROLES: tuple[Role, ...] = get_args(Role)

LATE_RANK = 0
"""The rank whose reports come late: one that does not sample, unless it is alone."""


@dataclass(frozen=True)
class Connector:
    """One choice of `--connector`.

    Attributes:
        name: as on the command line.
        late_steps: steps by which the reports of `LATE_RANK` come late, or None: there is no connector.
        role: vLLM's `kv_role`.
    """

    name: str
    late_steps: int | None = None
    role: Role = "kv_both"


NONE = Connector("none")
ON_TIME = Connector("on-time", 0)

NAMES = (NONE.name, ON_TIME.name, "late-K")


def find(text: str, role: Role, pp: int) -> tuple[Connector, ...]:
    """Read "none,on-time,late-8".

    Raises:
        ConfigError: a name is unknown, comes twice, or needs more stages than `pp`.
    """
    found = tuple(replace(_of_name(name), role=role) for name in text.split(","))
    if len(set(found)) < len(found):
        raise ConfigError(f"--connector {text}: name each one once")
    late = [connector.name for connector in found if connector.late_steps]
    if late and pp == 1:
        raise ConfigError(f"--connector {late[0]} needs --pp 2 or more: the late rank is one before the last")
    return found


def _of_name(name: str) -> Connector:
    for known in (NONE, ON_TIME):
        if name == known.name:
            return known
    head, _, number = name.partition("-")
    if head != "late" or not number.isascii() or not number.isdecimal() or not int(number):
        raise ConfigError(
            f"--connector {name} is unknown: choose among {', '.join(NAMES)}, with a number of steps from 1 for K"
        )
    return Connector(f"late-{int(number)}", int(number))


class Sends:
    """What one rank has to report.

    Args:
        late_steps: after how many further steps.
    """

    def __init__(self, late_steps: int) -> None:
        self._under_way: deque[set[str]] = deque(set[str]() for _ in range(late_steps))

    def step(self, ended: Iterable[str]) -> set[str]:
        """Requests whose sending is reported with this step, of which the rank is told that these have `ended`."""
        self._under_way.append(set(ended))
        return self._under_way.popleft()
