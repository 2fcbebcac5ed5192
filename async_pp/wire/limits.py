"""Upper bounds of what a frame may be. A frame over a limit is refused before anything of it is decoded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one frame.

    Attributes:
        max_parts: payload parts (a pickle and its out-of-band buffers).
        max_message_bytes: the encoded message.
        max_payload_bytes: all payload parts together.
    """

    max_parts: int = 4096
    max_message_bytes: int = 1 << 17
    max_payload_bytes: int = 1 << 30
