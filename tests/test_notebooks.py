"""Notebooks, in a real kernel: cells run again, fits that are interrupted, the example."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.filterwarnings("ignore:::zmq", "ignore::DeprecationWarning:jupyter_client"),
]

EXAMPLE = Path(__file__).parents[1] / "examples/digits.ipynb"

IMPORTS = """
from pathlib import Path
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fulgurite import Trainer, backend
torch.manual_seed(0)
x = torch.randn(640, 8)
data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)
def trainer(**options):
    for off in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        options[off] = False
    csx = backend("CSX", autogen_policy="disabled")
    return Trainer(backend=csx, **{"max_steps": 5, "max_epochs": -1, **options})
"""
CLASS = """
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
STEPS = """
class Steps(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == 20:
            Path("stepping").touch()
"""


class Notebook:
    """A kernel, and the cells that ran in it.

    Args:
        client: nbclient's.
        folder: where the kernel runs.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.outputs: list[Any] = []  # of the cell that ran last

    async def run(self, source: str, interrupt_at: str = "") -> Any:
        """The output of a cell: what its last line gives, or its error.

        ``interrupt_at`` is a file: when the cell has made it, the kernel is interrupted.
        """
        cell = nbformat.v4.new_code_cell(source)
        cells = self._client.nb.cells
        cells.append(cell)
        task = asyncio.create_task(self._client.async_execute_cell(cell, len(cells) - 1))
        if interrupt_at:
            while not (self._folder / interrupt_at).exists():
                assert not task.done(), cell.outputs
                await asyncio.sleep(0.05)
            await self._client.km.interrupt_kernel()
        await task
        self.outputs = cell.outputs
        told = [one for one in self.outputs if one.output_type in ("execute_result", "error")]
        return told[-1] if told else None

    async def value(self, source: str) -> str:
        """What the last line of a cell gives, as text; the cell must succeed."""
        found = await self.run(source)
        assert found.output_type == "execute_result", (found.ename, found.evalue)
        text: str = found.data["text/plain"]
        return text


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Runs an async function with a ``Notebook`` whose kernel runs in ``tmp_path``."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def run(cells: Any) -> None:
        async def in_kernel() -> None:
            place = {"metadata": {"path": str(tmp_path)}}
            options = {"timeout": 300, "kernel_name": "python3", "allow_errors": True}
            client = nbclient.NotebookClient(nbformat.v4.new_notebook(), resources=place, **options)
            async with client.async_setup_kernel():
                opened = Notebook(client, tmp_path)
                assert await opened.run(IMPORTS + CLASS + STEPS) is None
                await cells(opened)

        asyncio.run(in_kernel())

    return run


def test_a_class_is_defined_again_and_fitted_again(notebook: Any) -> None:
    async def cells(notebook: Notebook) -> None:
        fit = "module = Net(); one = trainer(); one.fit(module, data)\n"
        loss = "float(one.callback_metrics['loss'])"
        first = float(await notebook.value(f"torch.manual_seed(1); {fit}{loss}"))
        await notebook.run(CLASS.replace("batch[1])", "batch[1]) + 100"))
        again = await notebook.value(
            "one.fit_loop.epoch_loop.max_steps = 8; one.fit(module, data)\n" + loss
        )
        assert float(again) < 50  # the old class's module
        second = float(await notebook.value(f"torch.manual_seed(1); {fit}{loss}"))
        assert second == pytest.approx(first + 100, abs=1e-4)
        await notebook.run(CLASS.replace("batch[1])", "batch[1]) + SHIFT"))
        for shift in (200, 300):  # a number of another cell
            found = await notebook.value(f"SHIFT = {shift}; torch.manual_seed(1); {fit}{loss}")
            assert float(found) == pytest.approx(first + shift, abs=1e-4)
        error = await notebook.run("Trainer(device='CPU')")
        assert "A backend with type CSX has already been instantiated" in error.evalue

    notebook(cells)


def test_a_fit_is_interrupted_and_both_go_on(notebook: Any) -> None:
    async def cells(notebook: Notebook) -> None:
        forever = "module = Net(); one = trainer(max_steps=-1, callbacks=[Steps()])\n"
        error = await notebook.run(forever + "one.fit(module, data)", interrupt_at="stepping")
        assert error.ename == "SystemExit"  # as Lightning ends an interrupted fit
        steps = int(await notebook.value("assert one.interrupted; one.global_step"))
        assert steps >= 20
        other = "two = trainer(); two.fit(module, data); two.global_step"
        assert await notebook.value(other) == "5"
        more = f"one.fit_loop.epoch_loop.max_steps = {steps + 5}; one.fit(module, data)\n"
        assert await notebook.value(more + "one.global_step") == str(steps + 5)
        steps_of = "[len(t.strategy.step_functions) for t in (one, two)]"
        assert await notebook.value(f"two.fit(Net(), data); {steps_of}") == "[1, 1]"

    notebook(cells)


def test_an_error_names_the_cell_and_shows_its_line(notebook: Any) -> None:
    async def cells(notebook: Notebook) -> None:
        await notebook.run(CLASS.replace("batch[1])", "batch[1]) * float(batch[0].sum())"))
        found = await notebook.run("trainer().fit(Net(), data)")
        assert found.ename == "HostRead"
        assert "  at Cell In[2]:6 in training_step\n      loss = nn." in found.evalue
        assert "batch[1]) * float(batch[0].sum())\n" in found.evalue
        assert "torch/" not in "".join(found.traceback)  # the user's frames alone
        assert "lightning/" not in "".join(found.traceback)
        await notebook.run(CLASS)
        assert await notebook.value("one = trainer(); one.fit(Net(), data); one.global_step") == "5"

    notebook(cells)


def test_the_example_runs_from_top_to_bottom(tmp_path: Path) -> None:
    book = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    for cell in code:
        cell.source = cell.source.replace("EPOCHS = 10", "EPOCHS = 2").replace(
            'device="CSX"', 'backend={"backend_type": "CSX", "autogen_policy": "disabled"}'
        )
    sources = "\n".join(cell.source for cell in code)
    assert "EPOCHS = 2" in sources
    assert sources.count("disabled") == 2
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=place).execute()
    shown = "".join(str(cell.outputs) for cell in code)
    assert "training program" in shown
    assert "test_accuracy" in shown


def test_what_a_fit_took_is_one_output_beside_a_bar(notebook: Any) -> None:
    async def cells(notebook: Notebook) -> None:
        await notebook.run(
            "from lightning.pytorch.callbacks import RichProgressBar\n"
            "one = Trainer(device='CSX', max_epochs=2, callbacks=[RichProgressBar()],"
            " logger=False, enable_checkpointing=False, enable_model_summary=False)\n"
            "one.fit(Net(), data)"
        )
        texts = [one.text for one in notebook.outputs if one.output_type == "stream"]
        [table] = [text for text in texts if "CSX: 80 batches" in text]
        assert "a batch" in table
        shown = [one for one in notebook.outputs if one.output_type == "display_data"]
        assert not any("CSX" in one.data["text/plain"] for one in shown)

    notebook(cells)
