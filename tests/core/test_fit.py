"""Stage times are found again from the steps they were made of."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.fit import FRESH, MEMORY, Fit, Line, Size

from .pipes import VARIED

TRUE = Line(0.004, 0.001, 0.0001, 2e-8)


def fitted(line: Line, sizes: list[Size], *, stages: int = 2, noise: float = 0.0) -> Fit:
    """A fit that has seen each size often."""
    fit, rng = Fit(stages), random.Random(1)
    for _ in range(MEMORY):
        for size in sizes:
            fit.add(size, [line.of(size) * (1 + noise * rng.random()) for _ in range(stages)])
    return fit


def test_nothing_is_known_before_the_first_step() -> None:
    assert Fit(2).total is None and Fit(2).slowest is None


def test_the_coefficients_come_out() -> None:
    fit = fitted(TRUE, VARIED)
    assert fit.slowest is not None and fit.total is not None
    for size in [*VARIED, Size(16, 16, 1600), Size(3, 1000, 500_000)]:
        assert fit.slowest.of(size) == pytest.approx(TRUE.of(size), rel=0.02)
        assert fit.total.of(size) == pytest.approx(2 * TRUE.of(size), rel=0.02)


def test_with_noise_they_come_near() -> None:
    fit = fitted(TRUE, VARIED, noise=0.1)
    assert fit.slowest is not None
    assert fit.slowest.of(Size(16, 16, 1600)) == pytest.approx(1.05 * TRUE.of(Size(16, 16, 1600)), rel=0.05)


def test_the_slowest_stage_is_the_one_that_is_slowest_on_average() -> None:
    fit = Fit(3)
    for turn in range(200):
        fit.add(Size(4, 4), [0.010, 0.020, 0.100 if turn % 20 == 0 else 0.001])
    assert fit.slowest is not None
    assert fit.slowest.of(Size(4, 4)) == pytest.approx(0.020, rel=0.01)


def test_what_was_learned_at_other_sizes_is_kept() -> None:
    """A long stretch of equal steps does not make the fixed part and the part per sequence the same thing."""
    fit = fitted(TRUE, VARIED)
    for _ in range(5000):
        fit.add(Size(4, 4, 900), [TRUE.of(Size(4, 4, 900))] * 2)
    assert fit.slowest is not None
    assert fit.slowest.of(Size(8, 8, 100)) == pytest.approx(TRUE.of(Size(8, 8, 100)), rel=0.02)


def test_a_change_is_followed() -> None:
    fit = fitted(TRUE, [Size(4, 4)])
    for _ in range(8 * MEMORY):
        fit.add(Size(4, 4), [2 * TRUE.of(Size(4, 4))] * 2)
    assert fit.slowest is not None
    assert fit.slowest.of(Size(4, 4)) == pytest.approx(2 * TRUE.of(Size(4, 4)), rel=0.02)


def test_a_new_kind_of_step_counts_at_once_and_a_known_one_now_and_then() -> None:
    fit = Fit(1)
    fit.add(Size(1, 1), [0.010])
    first = fit.total
    fit.add(Size(1, 1), [0.010])
    assert fit.total is first
    fit.add(Size(4, 4), [0.013])
    assert fit.total is not first
    second = fit.total
    for _ in range(FRESH):
        fit.add(Size(4, 4), [0.013])
    assert fit.total is not second


def test_a_time_that_no_batch_changes_is_all_fixed() -> None:
    fit = fitted(Line(0.010, 0.0, 0.0, 0.0), VARIED)
    assert fit.slowest is not None
    assert fit.slowest.step == pytest.approx(0.010, rel=0.01)
    assert fit.slowest.of(Size(64, 64, 1e5)) == pytest.approx(0.010, rel=0.02)


def test_a_cold_first_step_is_not_remembered() -> None:
    fit = Fit(1)
    for seconds in (0.500, *[0.010] * FRESH):
        fit.add(Size(1, 8), [seconds])
    assert fit.slowest is not None
    assert fit.slowest.of(Size(1, 8)) == pytest.approx(0.010)


def test_steps_vary_when_their_sequences_do() -> None:
    fit = Fit(1)
    for size, varied in ((Size(1, 1), False), (Size(1, 300), False), (Size(4, 4), True), (Size(1, 2), True)):
        fit.add(size, [0.010])
        assert fit.varied is varied


def test_no_time_at_all() -> None:
    fit = fitted(Line(0.0, 0.0, 0.0, 0.0), VARIED)
    assert fit.total == Line(0.0, 0.0, 0.0, 0.0)


def test_a_chunk_takes_the_seconds_it_was_made_for() -> None:
    for history in (0, 100, 100_000):
        chunk = TRUE.chunk(0.020, history)
        assert TRUE.of(Size(0, chunk, chunk * (history + chunk / 2))) - TRUE.step == pytest.approx(0.020)
    assert TRUE.chunk(0.020, 100_000) < TRUE.chunk(0.020, 0), "chunks shrink as the prefix grows"
    assert Line(0.004, 0.001, 0.0001, 0.0).chunk(0.020, 5) == pytest.approx(200)
    assert Line(0.010, 0.0, 0.0, 0.0).chunk(0.0, 5) == math.inf


@given(
    st.lists(
        st.tuples(st.integers(1, 512), st.integers(0, 4096), st.integers(0, 10**7), st.floats(0, 10)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_comes_the_coefficients_are_finite_and_not_negative(
    steps: list[tuple[int, int, int, float]],
) -> None:
    fit = Fit(1)
    for sequences, more, attention, seconds in steps:
        fit.add(Size(sequences, sequences + more, attention), [seconds])
    for line in (fit.total, fit.slowest):
        assert line is not None
        assert all(value >= 0 and math.isfinite(value) for value in (line.step, line.sequence, line.token, line.pair))
