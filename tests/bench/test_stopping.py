"""A signal never comes between the making of a process and the note that it is ours."""

import os
import signal

import pytest

from async_pp.bench.stopping import Stopped, install, uninterrupted


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
