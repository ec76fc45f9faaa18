"""Write docs/metrics.md from the table of metrics, each of which it runs.

python tests/tools/document_metrics.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from metric_table import ENTRIES, KINDS, where

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

HEAD = """# torchmetrics in a step

All metrics of `torchmetrics.classification` and `torchmetrics.regression` (1.9) work in a step:

```python
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from fulgurite import Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.accuracy = MulticlassAccuracy(10)
    def training_step(self, batch, batch_idx):
        x, y = batch
        predictions = self.net(x)
        self.accuracy(predictions, y)  # or self.accuracy.update(predictions, y)
        self.log("accuracy", self.accuracy)
        return nn.functional.cross_entropy(predictions, y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
loader = DataLoader(data, batch_size=32)
Trainer(device="CSX", max_epochs=2).fit(Net(), loader)
```

What a metric accumulates over an epoch, `metric.compute()` at its end, and what Lightning logs of
the metric equal stock's. Lists of tensors that a metric keeps (`SpearmanCorrCoef()`) are filled
from the program's outputs after each step. A `MetricTracker` may be incremented between
epochs: its new metric is another state, so programs are traced again, which takes about a first
step's time in each epoch.

**Updated in**: the program, or the host, which calls `metric.update(...)` after each step with what
the program computed. The host does it where shapes or branches of the update depend on values.

**Batch value in**: what `metric(predictions, y)` returns. Where no program can compute it, the step
may call the metric, and log the value (`self.log("m", self.metric(p, y))`) or the metric, with
`on_step=True` too: the host then computes the value after each step. Any other use in the step
(`loss + self.metric(p, y)`, `return self.metric(p, y)`) is an `UnsupportedState` error on that
line. Where nobody logs it on each step, it is not computed.

The same error comes of `metric.compute()` or `metric.reset()` in the step where the host updates
the metric, and of `metric.compute()` of one that keeps all batches: they would come too early. What
to write instead, with the same numbers:

```python
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.wrappers import Running

class Measured(Net):
    def __init__(self):
        super().__init__()
        self.metric = MulticlassAUROC(10)
        self.running = Running(MulticlassAccuracy(10), window=5)
    def training_step(self, batch, batch_idx):
        x, y = batch
        predictions = self.net(x)
        self.metric(predictions, y)  # the value of each batch: a line of its own,
        self.log("metric", self.metric, on_step=True, on_epoch=True)  # and log the metric
        self.running.update(predictions, y)  # Running(...), MinMaxMetric(...): update in the step,
        return nn.functional.cross_entropy(predictions, y)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("running", self.running.compute())  # and compute after it

Trainer(device="CSX", max_epochs=2).fit(Measured(), loader)
```

Functions of `torchmetrics.functional` work where they are static: their checks of values are off,
as `validate_args` is.

`torchmetrics.wrappers.Running` counts batches in Python, so the host updates it. `task="binary"`
and its kin (`Accuracy(task=...)`) pick one of these classes. Other metrics (text, image, retrieval,
one's own) go by the same rules, and are not in this table.

Made from `tests/support/metric_table.py` by `tests/tools/document_metrics.py`. Each metric runs two
epochs of validation, called and updated, the last batch smaller, and equals stock Lightning on the
CPU (relative 1e-5).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    found = {name: places for entries in KINDS.values() for name, places in where(entries).items()}
    for library in dict.fromkeys(entry.library for entry in ENTRIES):
        yield f"## {library.capitalize()}\n"
        yield "| metric | updated in | batch value in |"
        yield "|---|---|---|"
        for entry in ENTRIES:
            if entry.library == library:
                updated, value = found[entry.id]
                binned = " with `thresholds=5`" if "thresholds" in entry.options else ""
                yield f"| `{entry.name}`{binned} | {updated} | {value} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
