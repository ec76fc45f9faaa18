"""Every pass leaves a sound graph; one that is not sound is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import graph_of
from harness import fit
from models import Classifier, Measured, Transformer, convnet, loader, mlp, pictures, tokens

from fulgurite.backends.csx.graph.fakes import laid_out_by_kernels
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import COMPILER_PASSES, lower, observing_passes
from fulgurite.backends.csx.graph.verify import verify
from fulgurite.backends.csx.plugins.precision_plugins import CSXMixedPrecision
from fulgurite.backends.patches import applied


def tiny() -> Graph:
    """(x @ w).relu()"""
    return graph_of(lambda x, w: (x @ w).relu(), torch.ones(2, 3), torch.ones(3, 4))


def relu(graph: Graph) -> torch.fx.Node:
    """Its last operation."""
    return list(graph.operations())[-1]


def test_a_traced_graph_is_sound() -> None:
    verify(tiny())


def test_a_result_lies_where_its_kernel_puts_it() -> None:
    """Fakes of torch's say of a turned operand's log-sigmoid that it lies turned, too."""
    with applied(laid_out_by_kernels()):
        graph = graph_of(lambda x: torch.nn.functional.logsigmoid(x.t()), torch.ones(2, 3))
    [_, node] = [one for one in graph.operations() if "get" not in str(one.target)]
    assert node.meta["val"][0].is_contiguous()
    verify(graph)


@pytest.mark.parametrize(
    "noted",
    [
        lambda x: x.double(),
        lambda x: x.new_empty(2, 5),
        lambda x: x.new_empty_strided((2, 4), (1, 2)),
        lambda x: None,
    ],
)
def test_a_result_that_is_noted_otherwise_than_it_comes_is_found(noted: Any) -> None:
    graph = tiny()
    node = relu(graph)
    with graph.mode:
        node.meta["val"] = noted(node.meta["val"])
    with pytest.raises(AssertionError, match=r"relu.* is noted as .*; run again it is"):
        verify(graph)


def test_an_input_that_has_no_placeholder_is_found() -> None:
    graph = tiny()
    with pytest.raises(AssertionError, match="2 placeholders for 1 inputs"):
        verify(replace(graph, inputs=graph.inputs[:1]))
    with pytest.raises(AssertionError, match=r"w_1|arg1_1"):
        verify(replace(graph, inputs=(graph.inputs[0], graph.inputs[0])))


def test_an_operation_that_reads_a_later_one_is_found() -> None:
    graph = tiny()
    node = relu(graph)
    node.all_input_nodes[0].append(graph.placeholders()[0])
    with pytest.raises(RuntimeError, match="before it has been defined"):
        verify(graph)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("make", "loaders", "options"),
    [
        (Measured, lambda: (loader(32), loader(32)), {}),
        (Measured, lambda: (loader(64),), {"accumulate_grad_batches": 2}),
        (lambda: Classifier(convnet()), lambda: (pictures(32),), {"precision": "16-mixed"}),
        (Transformer, lambda: (tokens(32),), {}),
        (Measured, lambda: (loader(32),), {"plugins": [CSXMixedPrecision("cbfloat16")]}),
    ],
    ids=["metrics", "accumulation", "float16", "dropout in attention", "cbfloat16"],
)
def test_every_pass_leaves_a_sound_graph(
    make: Callable[[], Any], loaders: Callable[[], Any], options: dict[str, Any]
) -> None:
    seen = []

    def look(name: str, before: Graph, graph: Graph) -> None:
        seen.append(name)
        verify(graph)
        if name == "prune":
            lower(graph, COMPILER_PASSES)

    with observing_passes(look):
        fit(make, loaders, static=True, limit_train_batches=2, limit_val_batches=1, **options)
    assert {"drop_renames", "functionalize", "prune", "realize_scalars"} <= set(seen)


@pytest.mark.fits
def test_artifact_dir_receives_the_graph_after_each_pass(tmp_path: Path) -> None:
    fit(
        lambda: Classifier(mlp()),
        lambda: (loader(32),),
        static=True,
        backend={"artifact_dir": tmp_path},
    )
    files = sorted((tmp_path / "training_passes").iterdir())
    assert [file.name for file in files] == [
        "01_write_updates_out.txt",
        "02_drop_renames.txt",
        "03_functional_draws.txt",
        "04_functionalize.txt",
        "05_drop_renames.txt",
        "06_fold_zeros.txt",
        "07_simplify.txt",
        "08_prune.txt",
        "09_hold_state.txt",
    ]
    assert "in training_step" in files[-1].read_text()
    assert "aten.addmm" in files[-1].read_text()
