"""What is imported when: nothing by ``import fulgurite``, no compiler before it compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

CHECKED = """
import sys
from fulgurite import cli

cli.main(["check", "--no-imports", *{files!r}])
slow = {{"torch", "lightning", "torchmetrics", "numpy", "pandas"}}
print(sorted(slow & {{name.partition(".")[0] for name in sys.modules}}))
"""
FILES = (
    *("examples/digits.yaml", "tests/trainer/config/schema/valid/everything.yaml"),
    *("tests/trainer/config/schema/valid/legacy.yaml", "tests/trainer/config/schema/broken"),
)
OURS = """
import sys
from fulgurite import Trainer

trainer = Trainer(device={device!r}, logger=False, enable_checkpointing=False)
"""
BESIDE_LIGHTNING = f"""
import lightning.pytorch as pl

pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
import sys

before = set(sys.modules)
{OURS}
known = ("fulgurite", *sys.stdlib_module_names)
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in known))
"""
FIT = f"""
import lightning.pytorch as pl
import torch
{OURS}

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer.fit_loop.max_epochs = 1
trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
assert [program.stage for program in trainer.strategy.programs] == ["training"]
print("torch._inductor.lowering" in sys.modules)
"""


def printed(code: str, folder: Path) -> str:
    """The last line that a fresh process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_fulgurite_imports_no_library(tmp_path: Path) -> None:
    code = "import fulgurite, sys; print({'torch', 'lightning', 'yaml'} & {*sys.modules})"
    assert printed(code, tmp_path) == "set()"


@pytest.mark.parametrize("name", FILES)
def test_a_check_without_imports_imports_no_library(name: str, tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / name
    files = [str(one) for one in (sorted(file.glob("*.yaml")) if file.is_dir() else [file])]
    assert files
    assert printed(CHECKED.format(files=files), tmp_path) == "[]"


@pytest.mark.long
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_a_trainer_imports_nothing_of_others_that_lightnings_does_not(
    device: str, tmp_path: Path
) -> None:
    assert printed(BESIDE_LIGHTNING.format(device=device), tmp_path) == "[]"


@pytest.mark.long
def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    code = FIT.format(device="CSX").replace(
        "device='CSX'", "backend={'backend_type': 'CSX', 'autogen_policy': 'disabled'}"
    )
    assert printed(code, tmp_path) == "False"


@pytest.mark.long
def test_errors_are_at_hand_where_the_package_is_imported() -> None:
    code = "import fulgurite; print(fulgurite.errors.MiscompiledWarning.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "MiscompiledWarning\n", done.stderr
