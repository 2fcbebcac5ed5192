"""The messages between the engine and a rank, as one tagged union.

A message says what is meant; what it carries (a scheduler's plan, a callable, an answer) travels beside it as payload
parts of the same frame and is decoded only when somebody asks for it.

Unknown fields are refused: a decoder that skips them would follow any nesting that they hold.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

SampleMode = Literal["none", "now", "later"]
"""Whether a step samples: not at all, right after its forward pass, or when its `Sample` comes."""

ReplyScope = Literal["output", "all"]
"""Which ranks answer a step: the output rank alone, or every rank."""

SPANS = 16
"""Steps whose times a rank that answers none of them tells at once: one by one they would wake the engine's loop for
every step and stage."""


class Execute(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="execute"):
    """To a rank: run one step. Payload: (plan, grammar bitmask or None)."""

    step: int
    sample: SampleMode
    reply: ReplyScope


class Sample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="sample"):
    """To a rank: sample the step that was sent with "later". Payload: grammar bitmask or None."""

    step: int


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="call"):
    """To a rank: apply a callable to the runner. Payload: the callable."""

    call: int


class Close(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="close"):
    """To a rank: end."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """From a rank: it is connected. `ranks`: how many it was told there are; `version`: of this package. A rank of a
    version that does not tell these can still be told apart."""

    pid: int
    ranks: int = 0
    version: str = ""


class Phase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="phase"):
    """From a rank: a start-up phase is done, after so many seconds."""

    name: str
    seconds: float


class StepReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="step"):
    """From a rank: a step's answer, and when it had the step's inputs and was done (monotonic seconds). Payload: the
    answer."""

    step: int
    began_s: float
    ended_s: float


class Reported(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="reported"):
    """From a rank: what its connectors report with a step that it does not answer. Payload: the output."""

    step: int


class Spans(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="spans"):
    """From a rank: the same two times of steps that it did not answer, as (step, began_s, ended_s)."""

    spans: Sequence[tuple[int, float, float]]


class StepFailed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="step-failed"):
    """From a rank: a step raised. `kind` is the error's class name, `text` its traceback."""

    step: int
    kind: str
    text: str


class CallReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="called"):
    """From a rank: a call's answer. Payload: the answer."""

    call: int


class CallFailed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="call-failed"):
    """From a rank: a call raised. Payload: the exception, when it could be pickled."""

    call: int
    kind: str
    text: str


class Bye(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="bye"):
    """From a rank: its last message."""

    reason: str


ToRank = Execute | Sample | Call | Close
FromRank = Hello | Phase | StepReply | Reported | Spans | StepFailed | CallReply | CallFailed | Bye
Message = ToRank | FromRank
