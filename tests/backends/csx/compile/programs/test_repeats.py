"""What comes again in a sequence of symbols."""

from __future__ import annotations

import random

from fulgurite.backends.csx.compile.programs.item_order import CALL_SYMBOLS, Repeat, repeats

LAYER = list(range(100, 140))


def found(symbols: list[int], costs: list[float] | None = None) -> list[Repeat]:
    """The repeats, each seen to be one."""
    result = repeats(symbols, costs or [0.0] * (len(symbols) + 1))
    taken: set[int] = set()
    for one in result:
        stretches = [symbols[start : start + one.length] for start in one.starts]
        assert all(stretch == stretches[0] for stretch in stretches)
        assert one.starts[-1] + one.length <= len(symbols)
        places = {start + i for start in one.starts for i in range(one.length)}
        assert len(places) == len(one.starts) * one.length
        assert not places & taken
        taken |= places
    return result


def test_layers_one_after_the_other_are_found() -> None:
    assert found([*range(7), *LAYER * 6, *range(20, 30)]) == [
        Repeat(tuple(range(7, 7 + 240, 40)), 40)
    ]


def test_a_layer_that_comes_again_later_is_found_too() -> None:
    symbols = [*LAYER, *LAYER, *range(50), *LAYER]
    assert found(symbols) == [Repeat((0, 40, 130), 40)]


def test_two_kinds_of_layers_are_found() -> None:
    backward = [symbol + 1000 for symbol in LAYER] + list(range(2000, 2010))
    lengths = {one.length: len(one.starts) for one in found(LAYER * 5 + backward * 5)}
    assert lengths == {40: 5, 50: 5}


def test_a_layer_begins_where_a_cut_costs_least_and_none_is_lost_for_it() -> None:
    symbols = [*LAYER[10:], *LAYER * 5, *LAYER[:20]]
    for best in (10, 15, 20):
        costs = [0.0 if (i - 30 - best) % 40 == 0 else 8.0 for i in range(len(symbols) + 1)]
        assert found(symbols, costs) == [Repeat(tuple(range(best - 10, best + 230, 40)), 40)]


def test_costs_that_grow_choose_as_costs_that_do_not() -> None:
    symbols = [*LAYER[10:], *LAYER * 5, *LAYER[:20]]
    flat = [0.0 if (i - 45) % 40 == 0 else 8.0 for i in range(len(symbols) + 1)]
    rising = [cost + 100.0 * i for i, cost in enumerate(flat)]
    [one] = found(symbols, rising)
    assert found(symbols, flat) == [one]
    assert one.starts[0] == 5


def test_many_small_steps_are_few_calls() -> None:
    step = list(range(CALL_SYMBOLS + 2))
    [one] = found(step * 64)
    assert len(one.starts) < 32
    assert len(one.starts) * one.length > 56 * len(step)


def test_what_saves_little_is_left() -> None:
    assert found(LAYER[:10] * 3) == []
    assert found(list(range(300))) == []
    assert found([]) == []


def test_whatever_is_found_is_a_repeat() -> None:
    draw = random.Random(0)
    for _ in range(100):
        pieces = [[draw.randrange(6) for _ in range(draw.randrange(1, 60))] for _ in range(4)]
        found([symbol for _ in range(draw.randrange(30)) for symbol in draw.choice(pieces)])
