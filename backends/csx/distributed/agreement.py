"""Whether all processes have traced the same step: what it computes for others, compared.

Compared are the operations that weights, other state and collectives follow from, as each process
traced them, and which logged values all of them reduce at the epoch's end. What one process alone
returns or logs is its own affair.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import metadata
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fulgurite.backends.csx.capture import CapturedStep, Exchange, logs_reduced_later
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.trace_errors import BatchesDiffer, GraphsDiffer
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.distributed.heartbeats import waiting_for
from fulgurite.backends.csx.graph.collectives import has_collectives, is_collective
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import operation_name, written_nodes
from fulgurite.backends.csx.state import ShardedTensor, optimizer_places

_Lines = list[tuple[str, str]]
"""Of each operation: what it is, and the user's line that it comes from."""


def agree(stage: str, captured: Mapping[str, CapturedStep]) -> None:
    """Compare a step with the other processes'; all of them call this.

    Where batches have other shapes on some ranks, sizes and numbers may be others too: operations
    are compared without them, but for those of collectives.

    Raises:
        GraphsDiffer: on every process, with the first operation that differs and both lines.
    """
    graphs = [one.graph.runs for one in captured.values()]  # before passes, which may differ
    logged = [
        (what, "") for one in captured.values() for what in logs_reduced_later(one.outputs.calls)
    ]
    lines = [line for graph in graphs for line in lines_of(graph)] + logged
    # a digest of each first: the lines themselves are sent only where they differ
    if _are_same(lines):
        return
    shapes = gathered([_batches_of(graph) for graph in graphs])
    are_same = all(one == shapes[0] for one in shapes)
    if not are_same:
        plain = [line for graph in graphs for line in lines_of(graph, with_sizes=False)]
        lines = plain + logged
    _refuse_others(f"{stage} step", lines, _REMEDY if are_same else _REMEDY_OF_SHAPES)


_REMEDY = (
    "the same Python on all processes: what depends on self.global_rank belongs into a hook between"
    " steps, or into the batch: return (*batch, torch.tensor(self.global_rank)) from"
    " on_before_batch_transfer"
)
_REMEDY_OF_SHAPES = (
    "the same Python on all processes, whatever the shapes of their batches, which differ here; or"
    " batches of one shape (drop_last=True, pad to one length)"
)


def refuse_other_models(module: nn.Module) -> None:
    """See that all processes have made the same parameters and buffers; all of them call this.

    Raises:
        GraphsDiffer: on every process, with the first one that differs.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    lines = [(f"{name} {tuple(x.shape)} {x.dtype}", "") for name, x in named if not is_lazy(x)]
    if not _are_same(lines):
        _refuse_others("model", lines, _REMEDY_OF_MODELS)


_REMEDY_OF_MODELS = (
    "the same parameters and buffers, in the same order and of the same shapes and dtypes, made in"
    " every process, whatever its rank"
)


def refuse_other_runs(trainer: pl.Trainer, backend: CSXBackend) -> None:
    """See that all processes run with the same versions and options; all of them call this.

    Raises:
        MisconfigurationException: on every process, with the first thing that differs.
    """
    own = (item.name for item in fields(backend) if not item.name.endswith("_dir"))
    facts = {name: f"{name} {metadata.version(name)}" for name in _PACKAGES}
    facts |= {"Python": f"Python {sys.version.split()[0]}"}
    facts |= {name: f"{name}={getattr(trainer, name)!r}" for name in _OPTIONS}
    facts |= {f"backend {name}": f"{name}={getattr(backend, name)!r}" for name in own}
    first, *others = gathered(facts)
    for rank, found in enumerate(others, start=1):
        for name in facts:
            if found[name] != first[name]:
                raise MisconfigurationException(
                    f"Rank {rank} runs with {found[name]}, and rank 0 with {first[name]}. All"
                    " processes have to run the same: install the same versions, and start the"
                    " same script or parameter file."
                )


_PACKAGES = ("fulgurite", "torch", "lightning")
_OPTIONS = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps", "limit_train_batches", "val_check_interval"),
)


def refuse_other_ends(batches: list[tuple[int, bool]]) -> NoReturn:
    """Say that an epoch ends for some processes, and goes on for others; all of them call this.

    Args:
        batches: of each rank, at which batch of the epoch it is, from 1, and whether that is its
            last.

    Raises:
        BatchesDiffer: always.
    """
    last = {rank: number for rank, (number, is_last) in enumerate(batches) if is_last}
    ends = ", ".join(f"that of rank {rank} with batch {n}" for rank, n in last.items())
    others = [str(rank) for rank in range(len(batches)) if rank not in last]
    raise BatchesDiffer(
        f"The epoch's data ends on some ranks before others: {ends}. More is there for rank"
        f"{'s' * (len(others) > 1)} {', '.join(others)}.",
        remedy="as many batches on every rank: Lightning's own sampler"
        " (use_distributed_sampler=True) sees to that, a stream of yours by the same number of"
        " rows for each rank, or Trainer(limit_train_batches=N)",
    )


def refuse_other_epochs(places: list[tuple[int, int]]) -> None:
    """See that all processes are in one epoch; all of them call this.

    Args:
        places: of each rank, its epoch and the number of its batch there, from 1.

    Raises:
        BatchesDiffer: they are not.
    """
    behind, ahead = min(places), max(places)
    if behind[0] != ahead[0]:
        rank, other = places.index(ahead), places.index(behind)
        raise BatchesDiffer(
            f"Rank {rank} trains batch {ahead[1]} of epoch {ahead[0]}, and rank {other} batch"
            f" {behind[1]} of epoch {behind[0]}.",
            remedy="what ends an epoch early has to end it on all ranks, at the same batch: -1 from"
            " on_train_batch_start, which may follow from self.all_gather(value)",
        )


def refuse_other_exchanges(exchange: Exchange, numbers: Tensor | None) -> NoReturn:
    """Say what differs of a step that was another one in some process; all of them call this.

    Raises:
        GraphsDiffer: with the first parameter or number that does.
    """
    values = [] if numbers is None else numbers.tolist()
    pairs = zip(map(str, exchange.numbers), values, strict=True)
    reduced = [(f"averages the gradient of {name}", "") for name in exchange.reduced]
    updated = [(f"updates {name}", "") for name in exchange.updated]
    _refuse_others("training step", reduced + updated, _REMEDY_OF_FREEZING)
    _refuse_others(
        "training step", [(f"{name} is {value:g}", "") for name, value in pairs], _REMEDY_OF_NUMBERS
    )
    raise GraphsDiffer(
        "The training step is another one in some processes.", remedy=_REMEDY_OF_FREEZING
    )


def gradients_differ(rank: int, own: list[str], other: int, others: list[str]) -> GraphsDiffer:
    """The error of two processes that average the gradients of other parameters."""
    pairs = itertools.zip_longest(own, others, fillvalue="nothing")
    first, second = next((a, b) for a, b in pairs if a != b)
    return GraphsDiffer(
        f"The training step is another one on rank {other} than on rank {rank}.\n"
        f"  rank {rank}: averages the gradient of {first}\n"
        f"  rank {other}: averages the gradient of {second}",
        remedy=_REMEDY_OF_FREEZING,
    )


_REMEDY_OF_FREEZING = (
    "freeze, unfreeze and add parameters on all processes alike, at the same step: no condition on"
    " self.global_rank, or on a value that each process has of its own"
)
_REMEDY_OF_NUMBERS = (
    "set it on all processes alike; where it follows from a value that each has of its own, from"
    " what all have: self.all_gather(value).mean()"
)
APART = 1e-4
"""Relative: sums of the magnitudes of a tensor's elements, by which two are told apart. Processors
of several kinds may round differently."""


@torch.no_grad()
def refuse_other_states(
    module: nn.Module, optimizers: list[Optimizer], own: frozenset[str]
) -> None:
    """See that weights and optimizer state are the same in all processes; all of them call this.

    Args:
        module: whose weights.
        optimizers: whose state.
        own: names of what each process changes by itself, as DistributedDataParallel's do.

    Raises:
        GraphsDiffer: they are not, with the first tensor that is another one.
    """
    names = {id(p): f"self.{name}" for name, p in module.named_parameters()}
    held = {name: p for p, name in zip(module.parameters(), names.values(), strict=True)}
    owners = {f"optimizers[{i}]": one for i, one in enumerate(optimizers)}
    held |= {place.name: place.get() for place in optimizer_places(owners, names)}
    sums = [
        (name, float(tensor.abs().sum(dtype=torch.float64)))
        for name, tensor in held.items()
        if isinstance(tensor, Tensor) and not isinstance(tensor, ShardedTensor) and name not in own
    ]
    first, *others = gathered(sums)
    for rank, found in enumerate(others, start=1):
        for (name, one), (other, two) in itertools.zip_longest(first, found, fillvalue=("", 0.0)):
            if name != other or (not math.isclose(one, two, rel_tol=APART) and not one != one):
                raise GraphsDiffer(
                    f"{name or other} is another one on rank {rank} than on rank 0: the magnitudes"
                    f" of its elements sum up to {two:g}, and to {one:g} there.",
                    remedy="change weights and optimizer state on all processes alike: a hook that"
                    " does so has no condition on self.global_rank",
                )


def refuse_other_batches(stage: str, batches: list[list[float]]) -> None:
    """See that an evaluation whose step has collectives has as many batches in each process.

    Args:
        stage: what it is.
        batches: of each rank, those of each loader.

    Raises:
        BatchesDiffer: on every process that calls this.
    """
    other = next((rank for rank, one in enumerate(batches) if one != batches[0]), None)
    if other is None or stage.startswith("training"):
        return
    raise BatchesDiffer(
        f"The {stage} step takes values of all ranks, and runs {batches[other]} times on rank"
        f" {other}, {batches[0]} times on rank 0 (by loader).",
        remedy="as many batches on every rank, by Lightning's own sampler"
        f" (use_distributed_sampler=True) or {_AT_THE_END}",
    )


def refuse_other_streams(stage: str, loader: int, has_one: bool, traced: Sequence[Graph]) -> None:
    """See that a stream has one more batch in all processes, or in none, where that matters.

    All of them call this. It matters where they put values together in the step, and where they
    compare what they trace of it.

    Args:
        stage: of which the loader is.
        loader: its number.
        has_one: whether it has a batch here.
        traced: what has been of its step.

    Raises:
        BatchesDiffer: on every process.
    """
    if traced and not any(map(has_collectives, traced)):
        return
    found = gathered((loader, has_one))
    rank = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if rank is None:
        return
    has = [
        f"has one more batch of loader {n}" if more else "has no more batch" for n, more in found
    ]
    why = "it takes values of theirs" if traced else "they compare what they trace of it"
    ways = f"as many batches on every rank: a stream of as many rows for each, or {_AT_THE_END}"
    raise BatchesDiffer(
        f"A stream of the {stage} ends on some ranks before others: rank 0 {has[0]}, and rank"
        f" {rank} {has[rank]}. But all ranks take part in the step: {why}.",
        remedy=ways if traced else "one batch at least on every rank",
    )


_AT_THE_END = (
    "limit_val_batches; or values that are put together at the epoch's end:"
    " self.log(..., on_step=False, on_epoch=True, sync_dist=True)"
)


def gathered(value: Any) -> list[Any]:
    """A value of each process, in the order of their ranks; all of them call this."""
    found: list[Any] = [None] * dist.get_world_size()
    with waiting_for("a message of the host"):
        dist.all_gather_object(found, value)
    return found


def _are_same(lines: _Lines) -> bool:
    digest = hashlib.sha256("\n".join(what for what, _ in lines).encode()).hexdigest()
    return len(set(gathered(digest))) == 1


def _refuse_others(subject: str, lines: _Lines, remedy: str) -> None:
    first, *others = gathered(lines)
    for rank, found in enumerate(others, start=1):
        for one, two in itertools.zip_longest(first, found, fillvalue=("nothing", "")):
            if one[0] != two[0]:
                raise GraphsDiffer(
                    f"The {subject} is another one on rank {rank} than on rank 0.\n"
                    f"  rank 0: {one[0]}{one[1]}\n"
                    f"  rank {rank}: {two[0]}{two[1]}",
                    remedy=remedy,
                )


def _batches_of(graph: Graph) -> list[tuple[int, ...]]:
    given = zip(graph.placeholders(), graph.inputs, strict=True)
    return [tuple(node.meta["val"].shape) for node, item in given if item.kind is Kind.BATCH]


def lines_of(graph: Graph, *, with_sizes: bool = True) -> _Lines:
    """The operations that state and collectives follow from, numbered among themselves.

    Args:
        graph: the step.
        with_sizes: say shapes and numbers of all; without, those of collectives alone.
    """
    wanted = _behind(graph)
    names: dict[fx.Node, str] = {
        node: item.name for node, item in zip(graph.placeholders(), graph.inputs, strict=True)
    }
    lines: _Lines = []
    for node in graph.operations():
        if node not in wanted:
            continue
        names[node] = f"%{len(lines)}"
        line = line_of(node)
        place = "" if line is None else f", {line.place}: {line.source}"
        name = operation_name(node.target) or str(node.target)
        if with_sizes or is_collective(node.target):
            named = partial(fx.map_arg, fn=lambda arg: _Name(names.get(arg, "?")))
            shape = tuple(getattr(node.meta.get("val"), "shape", ()))
            what = f"{name}{named(node.args)}{named(dict(node.kwargs)) or ''} {shape}"
        else:
            what = f"{name}({', '.join(names.get(one, '?') for one in node.all_input_nodes)})"
        lines.append((what, place))
    return lines


class _Name(str):
    """A name that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _behind(graph: Graph) -> set[fx.Node]:
    """The operations that write state or are collectives, and all that they read.

    What one rank alone returns or logs is in none of them, so that only it may differ.
    """
    kinds = zip(graph.placeholders(), graph.inputs, strict=True)
    inputs = {node for node, item in kinds if item.kind in (Kind.STATE, Kind.GRADIENT)}
    waiting = [node for node in graph.operations() if is_collective(node.target)]
    waiting += [node for node in graph.operations() if inputs & set(_roots(written_nodes(node)))]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _roots(nodes: Any) -> Iterator[fx.Node]:
    """What views of it, back to the first one, are made of."""
    for node in nodes:
        while node.op == "call_function" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node
