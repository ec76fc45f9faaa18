"""What is private in torch and Lightning is in one list; each name is taken away in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from document_private_names import (
    AT_ONCE,
    COMPILED,
    LATE,
    OF_TEMPLATES,
    PAGE,
    TABLE,
    Scan,
    kinds,
    page,
    scan,
    table,
)

from fulgurite.backends.torch_versions import DROPS_COPIES, LOSES_ORDER

SCRIPT = Path(__file__).parents[1] / "support" / "removed_names.py"
MENDED = {
    "torch._inductor.fx_passes.post_grad.remove_noop_ops": DROPS_COPIES,
    "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body": LOSES_ORDER,
}
"""What is asked for in some versions only: whether in this one."""
RUN = "run: python tests/tools/document_private_names.py"


@pytest.fixture(scope="module")
def found() -> Scan:
    """What the code uses."""
    return scan()


def test_whose_each_name_is_is_known(found: Scan) -> None:
    assert sorted(found.strangers) == []


def test_the_page_and_the_table_are_what_the_code_gives(found: Scan) -> None:
    assert TABLE.read_text(encoding="utf-8") == table(found), RUN
    assert PAGE.read_text(encoding="utf-8") == page(found), RUN


def test_a_patch_and_a_name_of_every_kind_of_use_are_in_the_list(found: Scan) -> None:
    names = {
        "torch.fx._symbolic_trace._Patcher": AT_ONCE,  # imported
        "torch.utils._pytree.tree_leaves": AT_ONCE,  # of a module that is imported
        "torch._C._swap_tensor_impl": AT_ONCE,
        "lightning.pytorch.Trainer._logger_connector": AT_ONCE,  # of an object
        "lightning.pytorch.LightningModule._hparams_initial": AT_ONCE,  # in a string
        "torch.optim.adam._single_tensor_adam": AT_ONCE,  # replaced, by a name put together
        "lightning.pytorch.Trainer.current_epoch": AT_ONCE,  # public, and replaced
        "torch._inductor.sizevars.stride_at": COMPILED,
        "torch._inductor.decomposition.select_decomp_table": COMPILED,
        "jsonargparse._parameter_resolvers.get_signature_parameters": LATE,
    }
    assert {name: kinds(found.uses[name]) for name in names} == {n: [k] for n, k in names.items()}
    assert len(found.sites) >= 54


def removed(found: Scan, kind: str, folder: Path) -> tuple[list[float], list[dict[str, Any]]]:
    """Stock Lightning's losses, and what came of each name of a kind that was taken away."""
    names = [[name, kind] for name in sorted(found.uses) if kind in kinds(found.uses[name])]
    assert names
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, folder],
        input=json.dumps(names),
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *rows = map(json.loads, done.stdout.splitlines())
    assert [row["name"] for row in rows] == [name for name, _ in names]
    return first["losses"], rows


def unlike(said: str, name: str) -> bool:
    """Whether an error is not the one that names what is gone, and the version."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    named = last in said and f"was tested with {package}>=" in said
    return not (named and said.startswith(f"fulgurite.errors.UnsupportedVersion: {package} "))


@pytest.mark.process
@pytest.mark.long
def test_what_the_trainer_needs_is_missed_where_the_package_is_imported(
    found: Scan, tmp_path: Path
) -> None:
    """By each of its doors, with the same words."""
    _, rows = removed(found, AT_ONCE, tmp_path)
    wrong = [row for row in rows if unlike(row["said"], row["name"]) or row["said"].count("\n") > 1]
    assert wrong == []


@pytest.mark.process
@pytest.mark.long
def test_what_is_asked_for_late_is_missed_before_anything_was_trained(
    found: Scan, tmp_path: Path
) -> None:
    _, rows = removed(found, LATE, tmp_path)
    assert [row for row in rows if unlike(row["said"], row["name"])] == []
    assert {row["said"].splitlines()[-1] for row in rows} == {"after 0 steps"}


@pytest.mark.process
@pytest.mark.long
@pytest.mark.compiler
def test_what_compiling_needs_is_missed_by_the_line_of_a_program_that_runs_without(
    found: Scan, tmp_path: Path
) -> None:
    losses, rows = removed(found, COMPILED, tmp_path)
    wrong = []
    for row in rows:
        if not MENDED.get(row["name"], True):
            continue
        last = row["name"].rpartition(".")[2]
        try:
            said = json.loads(row["said"])
        except ValueError:  # an error
            wrong.append(row)
            continue
        fell = said["how"].startswith("run operation by operation (torch's compiler failed: ")
        if row["name"] in OF_TEMPLATES:  # gets as far as the C++ compiler, which fails there
            last = "it fails"
        if not fell or last not in said["how"] or said["losses"] != pytest.approx(losses):
            wrong.append(row)
    assert wrong == []
