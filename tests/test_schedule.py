"""The learning rate against the paper's formula."""

import math

import pytest

from training.schedule import InverseSquareRootSchedule


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (128, 7), (16, 1)])
def test_the_rate_is_equation_3_at_every_update(d_model, warmup):
    schedule = InverseSquareRootSchedule.from_d_model(d_model, warmup)
    for step in range(1, 3 * warmup + 2):
        assert schedule(step) == pytest.approx(d_model**-0.5 * min(step**-0.5, step * warmup**-1.5), rel=1e-12)


def test_the_peak_is_reached_at_the_end_of_warm_up_and_halves_at_four_times_as_many_updates():
    schedule = InverseSquareRootSchedule(peak=0.005, warmup_steps=40)
    rates = [schedule(update) for update in range(1, 500)]
    assert max(rates) == schedule(40) == 0.005
    assert schedule(10) == pytest.approx(0.005 / 4)
    assert schedule(160) == pytest.approx(0.005 / 2)


@pytest.mark.parametrize("warmup", [0, 1, 4000])
def test_the_first_update_has_a_finite_rate_above_zero(warmup):
    assert 0 < InverseSquareRootSchedule(peak=0.01, warmup_steps=warmup)(1) <= 0.01


def test_without_warm_up_the_rate_falls_from_the_peak():
    schedule = InverseSquareRootSchedule(peak=0.01, warmup_steps=0)
    assert [schedule(1), schedule(4), schedule(100)] == pytest.approx([0.01, 0.005, 0.001])


def test_cooldown_falls_linearly_to_zero_after_the_last_update():
    plain = InverseSquareRootSchedule(peak=0.01, warmup_steps=5)
    cooling = InverseSquareRootSchedule(peak=0.01, warmup_steps=5, cooldown_steps=3, max_updates=20)
    factors = [cooling(update) / plain(update) for update in range(15, 22)]
    assert factors == pytest.approx([1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0])


@pytest.mark.parametrize("update", [0, -1])
def test_updates_before_the_first_are_refused(update):
    with pytest.raises(ValueError, match=f"counted from 1, got {update}"):
        InverseSquareRootSchedule(peak=0.01, warmup_steps=5)(update)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": 0.0, "warmup_steps": 5}, r"rate \(0.0\) must be greater than 0"),
        ({"peak": math.nan, "warmup_steps": 5}, r"rate \(nan\) must be greater than 0"),
        ({"peak": 0.1, "warmup_steps": -5}, r"warmup_steps \(-5\) must not be negative"),
        ({"peak": 0.1, "warmup_steps": 5, "cooldown_steps": 9, "max_updates": 8}, r"cooldown_steps \(9\) must fit in"),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        InverseSquareRootSchedule(**arguments)


def test_the_papers_formula_needs_warm_up():
    with pytest.raises(ValueError, match="needs warmup_steps of at least 1, got 0"):
        InverseSquareRootSchedule.from_d_model(16, 0)
