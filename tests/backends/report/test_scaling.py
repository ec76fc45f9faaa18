"""A step on more systems, computed by hand; and the page whose tables come from it."""

from __future__ import annotations

import pytest
from document_scaling import PAGE, page

from fulgurite.backends.report.scaling import (
    H200_NODES,
    PARTS,
    SCATTER,
    SWARM,
    SYSTEMS,
    Link,
    Message,
    Network,
    Step,
    message_s,
    most,
    scaled,
    table,
)

RING = Network(name="ring", links=(Link(bytes_per_s=100.0, latency_s=1.0),))
STEP = Step(compute_s=30.0, backward_share=0.5, messages=(Message(size_bytes=100, begins=1.0),))


def test_a_ring_adds_up_in_two_rounds() -> None:
    message = Message(size_bytes=100, begins=1.0)
    assert message_s(message, RING, 1) == (0.0, 0.0)
    assert message_s(message, RING, 2) == (2.0, 1.0)
    assert message_s(message, RING, 4) == (6.0, 1.5)


def test_other_collectives_are_halves_of_it_or_trees() -> None:
    gather = Message(kind="all_gather_into_tensor", size_bytes=100, begins=1.0)
    assert message_s(gather, RING, 4) == (3.0, 3.0)
    scatter = Message(kind="reduce_scatter_tensor", size_bytes=100, begins=1.0)
    assert message_s(scatter, RING, 4) == (3.0, 0.75)
    broadcast = Message(kind="broadcast", size_bytes=100, begins=1.0)
    assert message_s(broadcast, RING, 4) == (2.0, 2.0)


def test_a_tree_is_taken_where_it_is_sooner() -> None:
    link = Link(bytes_per_s=100.0, latency_s=1.0, trees=True)
    tree = Network(name="", links=(link,))
    small, large = (Message(size_bytes=size, begins=1.0) for size in (10, 100_000))
    assert message_s(small, tree, 16) == pytest.approx((8.0, 0.2))
    assert message_s(large, tree, 16) == pytest.approx((30.0, 1875.0))


def test_groups_add_up_first_and_send_a_share_each() -> None:
    links = (
        Link(bytes_per_s=100.0, latency_s=0.0, systems=4),
        Link(bytes_per_s=10.0, latency_s=0.0),
    )
    network, message = Network(name="", links=links), Message(size_bytes=400, begins=1.0)
    assert message_s(message, network, 4) == (0.0, 6.0)
    assert message_s(message, network, 8) == (0.0, 6.0 + 10.0)  # 100 bytes of each in pairs


def test_switches_that_add_up_take_as_long_for_all_sizes_of_cluster() -> None:
    link = Link(bytes_per_s=100.0, latency_s=1.0, fan_in=4)
    network, message = Network(name="", links=(link,)), Message(size_bytes=100, begins=1.0)
    assert [message_s(message, network, n) for n in (2, 4, 16, 17)] == [
        (2.0, 1.0),
        (2.0, 1.0),
        (4.0, 1.0),
        (6.0, 1.0),
    ]


def test_the_step_waits_for_what_the_backward_pass_does_not_hide() -> None:
    assert scaled(STEP, RING, 1).step_s == 30.0
    last = scaled(STEP, RING, 4)
    assert (last.step_s, last.efficiency) == (37.5, 0.8)
    assert (last.sent_bytes, last.bound) == (150.0, "latency")
    early = Step(
        compute_s=30.0,
        backward_share=0.5,
        messages=(Message(size_bytes=100, begins=0.5), Message(size_bytes=100, begins=0.6)),
    )
    both = scaled(early, RING, 2)  # from 7.5 to 10.5, and then to 13.5 of 15
    assert (both.step_s, both.bound) == (30.0, "compute")
    assert scaled(early, RING, 4).step_s == 30.0 + 7.5 + 7.5 + 7.5 - 15.0


def test_parts_are_halved_where_systems_are_doubled() -> None:
    parts = Message(kind=PARTS, size_bytes=100, begins=1.0)
    assert [message_s(parts, RING, n) for n in (2, 4)] == [(1.0, 0.5), (3.0, 0.75)]
    step = Step(compute_s=30.0, backward_share=0.5, messages=(parts,))
    assert [scaled(step, RING, n).sent_bytes for n in (1, 2, 4)] == [0.0, 50.0, 75.0]


def test_what_is_gathered_holds_up_what_uses_it_unless_it_came_meanwhile() -> None:
    def taken_s(*messages: Message) -> float:
        return scaled(Step(compute_s=30.0, backward_share=0.5, messages=messages), RING, 2).step_s

    first = Message(kind=PARTS, size_bytes=100, begins=-1.0, needed=-1.0)  # 1.5 s, beside nothing
    next_one = Message(kind=PARTS, size_bytes=100, begins=-1.0, needed=-0.5)
    late = Message(kind=PARTS, size_bytes=1800, begins=-0.5, needed=0.0)  # 10 s, 7.5 of it hidden
    gradient = Message(kind=SCATTER, size_bytes=100, begins=0.5, needed=1.0)
    last = Message(kind=SCATTER, size_bytes=100, begins=1.0)
    assert taken_s(first) == 31.5
    assert taken_s(first, next_one) == 31.5
    assert taken_s(first, next_one, late) == 34.0
    assert taken_s(first, next_one, late, gradient, last) == 35.5


def test_systems_that_share_cores_compute_longer_and_hide_nothing() -> None:
    shared = Network(name="", links=RING.links, cores=2)
    early = Step(
        compute_s=30.0, backward_share=0.5, messages=(Message(size_bytes=100, begins=0.0),)
    )
    assert scaled(early, RING, 4).step_s == 30.0
    assert scaled(early, shared, 2).step_s == 33.0
    assert scaled(early, shared, 4).step_s == 67.5


def test_sharing_a_batch_ends_where_messages_take_as_long_as_computing() -> None:
    rows = table(STEP, RING, shares_batch=True)
    assert rows[0].efficiency == 1.0
    assert most(rows, 0.5).systems == 4  # 7.5 s of each, and as many of a message
    assert most(table(STEP, RING), 0.5).systems == 8


def test_weights_that_are_streamed_are_for_one_system_too() -> None:
    link = Link(bytes_per_s=100.0, latency_s=1.0, fan_in=4)
    network = Network(name="", links=(link,), streamed=1.5)
    step = Step(compute_s=1.0, backward_share=0.5, messages=STEP.messages)
    alone, many = scaled(step, network, 1), scaled(step, network, 16)
    assert (alone.step_s, alone.bound, alone.sent_bytes) == (1.5, "weight streaming", 150.0)
    assert (many.step_s, many.bound, many.sent_bytes) == (5.5, "latency", 150.0)
    assert many.efficiency == pytest.approx(1.5 / 5.5)


@pytest.mark.parametrize("network", [RING, H200_NODES, SWARM], ids=lambda one: one.name)
def test_more_systems_are_never_faster_each(network: Network) -> None:
    rows = table(STEP, network)
    assert [row.systems for row in rows] == list(SYSTEMS)
    taken = [row.step_s for row in rows]
    assert taken == sorted(taken)
    assert all(0 < row.efficiency <= 1 for row in rows)


def test_the_page_has_the_tables_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
