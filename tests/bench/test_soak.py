"""The soak: what it calls growth, and a short one."""

import asyncio

import pytest

from async_pp.bench import soak
from async_pp.bench.__main__ import main
from async_pp.bench.soak import Held, grows, table


def looks(**changes):
    values = {"descriptors": 20, "threads": 3, "tasks": 1, "children": 0, "files": 2, "rss_mib": 900.0}
    return [Held(**{**values, **{name: value[index] for name, value in changes.items()}}) for index in range(8)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"descriptors": [20, 24, 23, 20, 22, 25, 21, 20]}, None),  # they went again
        ({"descriptors": [20, 20, 20, 20, 20, 20, 20, 21]}, "descriptors 20 -> 21"),
        ({"children": [0, 0, 0, 0, 0, 0, 0, 1]}, "children 0 -> 1"),
        ({"rss_mib": [600.0, 900.0, 930.0, 940.0, 935.0, 950.0, 945.0, 940.0]}, None),  # caches fill
        ({"rss_mib": [900.0 + 20 * index for index in range(8)]}, "resident memory 950 -> 1030 MiB"),
    ],
)
def test_what_growth_is(changes, told):
    assert grows(looks(**changes)) == told


def test_one_look_tells_nothing():
    assert grows(looks()[:1]) is None
    assert grows([]) is None


def test_the_table_has_the_first_and_the_last():
    lines = table(looks() * 10, looks()[:3]).splitlines()
    assert lines[0].split() == ["descriptors", "threads", "tasks", "children", "files", "rss_mib"]
    assert lines[1].split() == ["start", "1", "20", "3", "1", "0", "2", "900"]
    assert any(line.split()[:2] == ["start", "80"] for line in lines)
    assert lines[-1].split()[:2] == ["requests", "2/2"]


@pytest.mark.parametrize("argv", [["--starts", "1"], ["--requests", "-1"], ["--pp", "0"]])
def test_bad_input(argv, capsys):
    assert main(["soak", *argv]) == 1
    assert argv[0] in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_starts_leave_nothing():
    model = str(soak.resolve_model("tiny"))
    with soak.own_folder() as folder:
        starts, requests = asyncio.run(soak.soak(model, 2, 2, 48, folder, lambda text: None))
    assert (len(starts), len(requests)) == (2, soak.LOOKS + 1)
    assert grows(starts) is None
    assert grows(requests) is None
