"""How fast steps are before and after compiled code takes over, and when that is told."""

from __future__ import annotations

import pytest

from fulgurite.backends.csx.program.speed import STRETCH_STEPS, Gain, Pace, Speed


def add(speed: Speed, *seconds: float) -> None:
    for one in seconds:
        speed.add(one)


def unlike(speed: Speed, seconds: float) -> None:
    speed.leave_out()
    speed.add(seconds)


def test_a_gain_is_told_once_after_a_stretch_of_compiled_steps() -> None:
    speed, told = Speed(), list[Gain | None]()
    unlike(speed, 5.0)  # traced in it
    add(speed, *[0.0625, 0.1875] * STRETCH_STEPS, 0.5)
    speed.switch_to_compiled(told.append)
    speed.add(3.0)  # compared in it
    add(speed, *[0.03125] * 15)
    unlike(speed, 1.0)
    assert told == []
    add(speed, 0.03125)  # 0.5 s
    assert told == [Gain(0.125, 0.03125)]
    add(speed, *[0.25] * 200)
    assert len(told) == 1


def test_a_stretch_has_some_steps_where_they_are_long() -> None:
    speed, told = Speed(), list[Gain | None]()
    add(speed, *[8.0] * STRETCH_STEPS)
    speed.switch_to_compiled(told.append)
    add(speed, 20.0, *[2.0] * (STRETCH_STEPS - 1))
    assert told == []
    add(speed, 2.0)
    assert told == [Gain(8.0, 2.0)]


@pytest.mark.parametrize("before", [[2.0] * (STRETCH_STEPS - 1), [0.0625] * 7])
def test_after_few_steps_there_is_no_gain_to_tell(before: list[float]) -> None:
    speed, told = Speed(), list[Gain | None]()
    add(speed, *before)
    speed.switch_to_compiled(told.append)
    add(speed, *[0.0625] * 200)
    assert told == [None]


def test_another_program_that_is_compiled_meanwhile_ends_what_is_measured() -> None:
    speed, first, second = Speed(), list[Gain | None](), list[Gain | None]()
    add(speed, *[1.0] * STRETCH_STEPS)
    speed.switch_to_compiled(first.append)
    add(speed, 1.0)
    speed.switch_to_compiled(second.append)
    assert (first, second) == ([None], [])
    add(speed, *[0.5] * (STRETCH_STEPS + 1))
    assert (first, second) == ([None], [Gain(1.0, 0.5)])


def test_each_entry_point_has_a_pace_of_each_way_of_running() -> None:
    speed = Speed()
    mine, other = (Pace(), Pace()), (Pace(), Pace())
    speed.paces += [mine, other]
    speed.add(8.0)  # without a program
    speed.add(2.0, mine)
    speed.add(1.0, mine, True)
    speed.add(4.0, other)
    speed.leave_out()
    speed.add(9.0, other, True)
    assert mine == (Pace(1, 2.0), Pace(1, 1.0))
    assert other == (Pace(1, 4.0), Pace())
    assert (speed.pace(False), speed.pace(True)) == (Pace(3, 14.0), Pace(1, 1.0))
    assert (speed.pace(False).batch_s, Pace().batch_s) == (14 / 3, None)
    assert (speed.steps, speed.compiled_steps, speed.alike_steps) == (5, 2, 4)


def test_what_came_before_is_that_of_the_latest_stretch() -> None:
    speed, told = Speed(), list[Gain | None]()
    add(speed, *[1.0] * 300, *[0.5] * STRETCH_STEPS)
    speed.switch_to_compiled(told.append)
    add(speed, *[0.25] * (STRETCH_STEPS + 1))
    assert told == [Gain(0.5, 0.25)]


def test_all_steps_and_their_seconds_are_counted() -> None:
    speed = Speed()
    unlike(speed, 5.0)
    add(speed, *[0.5] * 30)
    assert (speed.steps, speed.in_steps_s) == (31, 20.0)


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (Gain(0.0071, 0.00204), "2.0 ms a batch, 7.1 before (3.5 times as fast)"),
        (Gain(0.0007, 0.000139), "0.14 ms a batch, 0.70 before (5.0 times as fast)"),
        (Gain(1.2, 0.0996), "100 ms a batch, 1,200 before (12.0 times as fast)"),
        (Gain(0.0018, 0.002), "2.0 ms a batch, 1.8 before (0.9 times as fast)"),
    ],
)
def test_a_gain_in_words(gain: Gain, told: str) -> None:
    assert str(gain) == told
