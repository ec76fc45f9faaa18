"""Indices that are checked in parallel loops: the text of a kernel, and a process that lives on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fulgurite.backends.csx.compile.inductor.translation_unit import throw_after_loops

CHECK = 'TORCH_CHECK((0 <= tmp7) & (tmp7 < 16L), "index out of bounds: 0 <= tmp7 < 16L");'
KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const int64_t* in_ptr0,
                       float* out_ptr0)
{
    #pragma omp parallel
    {
        int tid = omp_get_thread_num();
        #pragma omp PRAGMA
        HEADER
        {
            {
                auto tmp7 = in_ptr0[0];
                BODY
            }
        }
        #pragma omp for
        for(int64_t x0=0L; x0<8L; x0+=1L)
        {
            out_ptr0[x0] = 0;
        }
    }
}
"""
FOR = "for(int64_t x0=0L; x0<8L; x0+=1L)"
FORMS = {
    "a loop": ("for", FOR),
    "two loops": ("for collapse(2)", f"{FOR}\n        {FOR.replace('x0', 'x1')}"),
    "two loops with braces": ("for collapse(2)", f"{FOR}\n        {{\n{FOR.replace('x0', 'x1')}"),
    "a part for one thread": ("single", ""),
}


def kernel(form: str, body: str) -> str:
    pragma, header = FORMS[form]
    text = KERNEL.replace("PRAGMA", pragma).replace("HEADER", header).replace("BODY", body)
    lines = [line for line in text.split("\n") if line.strip()]
    if "braces" in form:
        lines.insert(lines.index("        #pragma omp for"), "        }")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", FORMS)
def test_a_check_in_a_parallel_loop_is_caught_in_it_and_thrown_at_the_end(form: str) -> None:
    made = throw_after_loops(kernel(form, CHECK))
    assert made.count("try {") == made.count("catch (...)") == 1
    before, after = made.split("try {")
    assert before.rstrip().endswith("{")
    assert CHECK in after.partition("catch (...)")[0]
    assert after.rstrip().endswith('throw std::out_of_range("index out of range");\n}')
    assert made.count("{") == made.count("}")


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_without_checks_stays_as_it_is(form: str) -> None:
    assert throw_after_loops(kernel(form, "")) == kernel(form, "")


def test_a_text_of_another_form_stays_as_it_is() -> None:
    for text in (
        kernel("a loop", CHECK).replace("kernel(", "other("),
        kernel("a loop", CHECK).replace(FOR, "while (true)"),
        kernel("a loop", CHECK).rstrip("}\n"),
    ):
        assert throw_after_loops(text) == text


SCRIPT = """
import sys, torch
sys.path.insert(0, {support!r})
import torch.nn.functional as F
from harness import csx
import fulgurite

backend = csx("default")
weight = torch.randn(16, 16)

@fulgurite.trace
def look_up(rows, ids):
    return weight[ids].sum() + F.nll_loss(rows, ids)

ids = torch.arange(40000) % 16
rows = torch.randn(40000, 16)
right = look_up(rows, ids)
ids[39000] = 99
try:
    look_up(rows, ids)
except IndexError as error:
    print(error)
ids[39000] = 39000 % 16
print("the same:", torch.equal(look_up(rows, ids), right))
"""


@pytest.mark.long
@pytest.mark.compiler
def test_a_bad_index_in_a_loop_of_two_threads_is_an_error_and_no_more(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[4] / "support")
    (tmp_path / "script.py").write_text(SCRIPT.format(support=support))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "script.py"],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "got 99, where 16 rows or classes take" in ran.stdout
    assert "script.py:" in ran.stdout
    assert "the same: True" in ran.stdout
