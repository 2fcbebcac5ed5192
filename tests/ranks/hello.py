"""Ranks that begin as no rank should."""

import os
import signal
import threading
from typing import Any

import msgspec

from async_pp import __version__
from async_pp.channel.zmq_rank import ZmqRankChannel
from async_pp.ranks.main import Bootstrap
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Hello


def _says(bootstrap: bytes, *hellos: Any) -> None:
    boot = msgspec.msgpack.decode(bootstrap, type=Bootstrap)
    channel = ZmqRankChannel(boot.endpoint, rank=boot.rank, epoch=boot.epoch, key=boot.key, limits=Limits())
    for hello in hellos:
        channel.send(hello)
    signal.pause()


def silent(bootstrap: bytes) -> None:
    threading.Event().wait()


def doubled(bootstrap: bytes) -> None:
    _says(bootstrap, *[Hello(pid=os.getpid(), ranks=2, version=__version__)] * 2)


def other_world(bootstrap: bytes) -> None:
    _says(bootstrap, Hello(pid=os.getpid(), ranks=7, version=__version__))


def other_version(bootstrap: bytes) -> None:
    _says(bootstrap, Hello(pid=os.getpid(), ranks=2, version="0.0.0"))


def old_version(bootstrap: bytes) -> None:
    _says(bootstrap, Hello(pid=os.getpid()))
