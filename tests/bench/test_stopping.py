"""A signal never comes between the making of a process and the note that it is ours."""

import asyncio
import os
import signal

import pytest

from async_pp.bench.stopping import Stopped, install, run_coroutine, uninterrupted


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_at_once_and_only_the_first(number):
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_waits_for_the_end_of_the_outermost_block():
    made = []

    def make():
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGTERM)
                made.append("inner")
            made.append("outer")

    with pytest.raises(Stopped):
        make()
    assert made == ["inner", "outer"]


def test_an_error_of_the_block_does_not_lose_the_signal():
    def make():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError("no such program")

    with pytest.raises(Stopped) as stopped:
        make()
    assert isinstance(stopped.value.__context__, OSError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_a_coroutine_which_may_end_in_its_own_way(number):
    ended = []

    async def work():
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # only the first counts
            await asyncio.sleep(0)
            ended.append(True)

    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        run_coroutine(work())
    assert (stopped.value.number, ended) == (number, [True])
    assert signal.getsignal(number) is before


def test_a_coroutine_that_is_let_be_returns_its_value():
    async def work():
        return await asyncio.sleep(0, "done")

    assert run_coroutine(work()) == "done"


def test_a_block_may_be_told_at_once_also_of_a_signal_before_it():
    told = []

    def make():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            with uninterrupted(lambda: told.append("late")):
                told.append("inside")

    with pytest.raises(Stopped):
        make()
    assert told == ["late", "inside"]
    install()

    def make_again():
        with uninterrupted(lambda: told.append("at once")):
            os.kill(os.getpid(), signal.SIGINT)
            told.append("after")

    with pytest.raises(Stopped):
        make_again()
    assert told[2:] == ["at once", "after"]
