"""The virtual loop: timers in order, no real time, no hang."""

import asyncio
import time

import pytest

from async_pp.bench import virtual


def test_timers_run_in_order_and_no_real_time_passes():
    story = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        story.append((name, asyncio.get_running_loop().time()))

    async def main():
        async with asyncio.TaskGroup() as tasks:
            for name, seconds in (
                ("week", 604_800.0),
                ("hour", 3600.0),
                ("soon", 0.25),
                ("also soon", 0.25),
                ("now", 0),
            ):
                tasks.create_task(wait(name, seconds))

    began = time.monotonic()
    virtual.run(main())
    assert time.monotonic() - began < 5
    assert story == [("now", 0), ("soon", 0.25), ("also soon", 0.25), ("hour", 3600), ("week", 604_800)]


def test_timeouts_are_virtual_too():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == 1000


def test_what_can_never_go_on_raises_with_the_names_and_ends_the_tasks():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait(), name="the one that waits")

    with pytest.raises(virtual.Deadlock, match="the one that waits"):
        virtual.run(main())
    assert ended == [True]


def test_a_call_from_a_signal_handler_wakes_it():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(100_000):  # more wake-ups than its socket holds unread
            loop.call_soon_threadsafe(lambda: None)
        await asyncio.sleep(1)
        return loop.time()

    assert virtual.run(main()) == 1


def test_threads_are_refused():
    async def main():
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(RuntimeError, match="no thread"):
        virtual.run(main())
