"""The losses of ``fulgurite.nn`` beside torch's: all, under every policy, fused and not.

    python tests/tools/losses.py                    every variant; takes an hour or more
    python tests/tools/losses.py --first            one of each loss
    python tests/tools/losses.py --policies default --reductions mean --names NLLLoss

Each line is a program of all variants of the losses (``tests/support/losses.py``) with one
reduction: the largest difference of a value or a gradient from torch's, and how many of the kernels
that fused losses ask for there are. The exit status is 1 where either is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from loss_cases import (
    CASES,
    FIRST,
    Case,
    Results,
    fused_kernels,
    in_program,
    loads,
    made,
    program,
    reductions,
    regions,
    results,
)

import fulgurite
from fulgurite.backends import reset_backend

POLICIES = ("disabled", "default", "aggressive")
TOLERANCE = 1e-5  # of float32, relative to the largest number of a tensor or 1


def differences(got: Results, wanted: Results, cases: list[Case]) -> dict[str, float]:
    """The largest difference in value and gradients of each case, by what it is called."""
    found = {}
    for case, (value, gradients), (right, rights) in zip(cases, got, wanted, strict=True):
        found[str(case)] = max(
            difference(a, b.detach())
            for a, b in zip([value, *gradients], [right, *rights], strict=True)
        )
    return found


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two tensors, relative to the largest number or 1; infinite where shape or type differ."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.isfinite().all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1))


def compared(cases: list[Case], policy: str, fused: bool, reduction: str) -> bool:
    """Run one program, print its line, and say whether it is right."""
    reset_backend()
    fulgurite.backend("CSX", autogen_policy=policy, background=False, audit=False)
    inputs = [case.inputs(torch.float32) for case in cases]
    wanted = results(made(nn, cases, reduction=reduction), cases, inputs)
    losses = made(fulgurite.nn, cases, reduction=reduction, use_autogen=fused)
    begun = time.perf_counter()
    with loads() as found:
        got = program(losses, cases)(inputs)
    seconds = time.perf_counter() - begun
    apart = differences(got, wanted, cases)
    wrong = [f"    {name}: {size:.1e}" for name, size in apart.items() if size > TOLERANCE]
    asked, counted = regions(losses), fused_kernels(found[-1])
    for name in asked.keys() | counted.keys():
        if asked[name] != counted[name]:
            wrong.append(f"    {name}: {counted[name]} kernels instead of {asked[name]}")
    kernels = f"{counted.total()} of {asked.total()} fused kernels"
    size = max(apart.values())
    print(f"{policy:10} use_autogen={fused!s:5} {reduction:9} {len(cases)} losses:", end=" ")
    print(f"apart by {size:.1e}, {kernels}, {seconds:.0f} s")
    print(*wrong, sep="\n", end="\n" * bool(wrong), flush=True)
    return not wrong


def main() -> int:
    """Return 1 where a number or a count of kernels is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--reductions", nargs="+", default=("none", "mean", "sum", "batchmean"))
    parser.add_argument("--names", nargs="+", default=[case.name for case in FIRST])
    parser.add_argument("--first", action="store_true", help="one variant of each loss")
    given = parser.parse_args()
    for known in ("reduction: 'mean' divides the total", "CosineEmbeddingLoss.use_autogen=True"):
        warnings.filterwarnings("ignore", message=known)
    right = True
    for policy in given.policies:
        for fused in (False, True):
            for reduction in given.reductions:
                variants = FIRST if given.first else CASES
                named = [case for case in variants if case.name in given.names]
                cases = [case for case in named if reduction in reductions(case)]
                cases = [case for case in cases if fused or in_program(case)]
                if cases:
                    right &= compared(cases, policy, fused, reduction)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
