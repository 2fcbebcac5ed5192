"""The choice of event loop."""

import asyncio


def stock() -> asyncio.AbstractEventLoop:
    """A new loop of the standard library."""
    return asyncio.new_event_loop()


def fast() -> asyncio.AbstractEventLoop:
    """A new uvloop."""
    import uvloop

    return uvloop.new_event_loop()
