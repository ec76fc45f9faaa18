"""What machines do: the curves between measured points, this machine, and the published ones."""

from __future__ import annotations

import pytest
import torch

from fulgurite.backends.csx.costs.machine import CS2, CS3, Curve, this_machine


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(1, 1.0), (10, 1.0), (100, 4.0), (10**1.5, 2.0), (1000, 4.0), (4000, 16.0)],
)
def test_a_curve_is_straight_in_logarithms_and_in_proportion_above(
    size: float, seconds: float
) -> None:
    assert Curve(((10, 1.0), (100, 4.0), (1000, 4.0))).seconds(size) == pytest.approx(seconds)


def test_the_highest_rate_of_a_curve_is_that_of_one_of_its_largest_points() -> None:
    assert Curve(((8, 0.01), (10, 1.0), (100, 4.0), (1000, 50.0))).most_per_s == 25


def test_this_machine_is_measured_once_and_left_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    machine = this_machine(1)
    assert machine is this_machine(1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert machine.name.endswith("1 thread")
    assert machine.weights_bytes_per_s is None


def test_more_threads_than_torch_has_are_as_many_as_it_has() -> None:
    threads = torch.get_num_threads()
    assert this_machine(threads + 7) is this_machine(threads)


def test_what_is_measured_goes_from_small_to_large() -> None:
    measured = this_machine(1).measured
    assert measured is not None
    for curve in (*measured.products.values(), measured.memory):
        sizes = [size for size, _ in curve.points]
        assert sizes == sorted(set(sizes))
        assert all(seconds > 0 for _, seconds in curve.points)


def test_the_wafers_are_as_published() -> None:
    assert CS2.flops_per_s == pytest.approx(7.48e15)  # cores, numbers a cycle, 2, clock
    assert CS3.flops_per_s == pytest.approx(15.84e15)
    assert CS2.bytes_per_s / 850_000 == pytest.approx(CS3.bytes_per_s / 900_000, rel=0.01)
    assert CS2.weights_bytes_per_s == CS3.weights_bytes_per_s == 150e9
