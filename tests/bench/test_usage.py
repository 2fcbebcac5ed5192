"""Arithmetic on samples, and names of processes."""

import os
import subprocess

import psutil
import pytest

from async_pp.bench import usage
from async_pp.bench.usage import Use

BEFORE = {10: Use("serve", 1.0, 2**20), 11: Use("rank", 5.0, 2**21), 12: Use("rank", 5.0, 2**21)}
AFTER = {
    10: Use("serve", 1.5, 2**20),
    11: Use("rank", 7.0, 3 * 2**20),
    12: Use("rank", 5.0, 2**20),
    13: Use("late", 0.25, 2**19),
}


def test_cpu_seconds_count_a_new_process_from_its_start():
    assert usage.cpu_s(BEFORE, AFTER) == pytest.approx(2.75)
    assert usage.cpu_s(BEFORE, BEFORE) == 0


def test_memory_is_the_sum():
    assert usage.rss_mib(AFTER) == pytest.approx(5.5)


def test_percentages_have_unique_names():
    percents = usage.percent_by_name(BEFORE, AFTER, 5.0)
    assert percents == pytest.approx({"serve": 10.0, "rank": 40.0, "rank 2": 0.0, "late": 5.0})


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (["/usr/bin/python", "-m", "async_pp.serve", "--model", "x"], "async_pp.serve"),
        (["/usr/bin/python", "-m", "async_pp.ranks.zygote", "5"], "async_pp.ranks.zygote"),
        (["async_pp", "rank", "0"], "async_pp rank 0"),
        (["VLLM::Worker_PP1"], "VLLM::Worker_PP1"),
        (
            ["python", "-c", "from multiprocessing.resource_tracker import main;main(9)"],
            "multiprocessing.resource_tracker",
        ),
        (["/usr/bin/python", "-c", "from multiprocessing.spawn import spawn_main"], "python3"),
        (["/usr/bin/sleep", "-m"], "python3"),
        ([], "python3"),
    ],
)
def test_names(cmdline, name):
    assert usage.name_of(cmdline, "python3") == name


def test_a_process_that_has_ended_is_left_out():
    with subprocess.Popen(["sleep", "60"]) as child:
        gone = psutil.Process(child.pid)
        child.kill()
    sample = usage.take([psutil.Process(), gone])
    assert list(sample) == [os.getpid()]
    assert sample[os.getpid()].cpu_s > 0
    assert sample[os.getpid()].rss_bytes > 2**20
