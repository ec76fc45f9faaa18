"""Write docs/lightning_parts.md from the rows of tests/support/lightning_parts.

python tests/tools/document_lightning_parts.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from lightning_parts import TABLES
from lightning_parts.base import Part

PAGE = Path(__file__).parents[2] / "docs" / "lightning_parts.md"

HEAD = """# Lightning's parts

Lightning's own callbacks, arguments and loaders: each does what it does in stock Lightning, or an
error says why not, before anything was trained where that can be known.

Made from `tests/support/lightning_parts` by `tests/tools/document_lightning_parts.py`. Each case
under "works" trains on CSX and in stock Lightning on the CPU. Equal are the hooks in their order,
each with epoch, step, batches seen, `is_last_batch`, `should_stop` and learning rates; losses and
logged values (relative 1e-5); weights, optimizer state and param groups (2e-5); and what the part
itself finds, writes or raises.

Fulgurite's own callbacks: [callbacks.md](callbacks.md). Metrics: [metrics.md](metrics.md). What a
step may do: [idioms.md](idioms.md).
"""

TAIL = """## What differs

- Programs are built anew where a part changes what a step is: another accumulation factor, layers
  that were frozen, unfrozen or pruned, optimizer state that was loaded. A line says so. With
  `max_programs=1` it is an error, but for loaded state.
- What `ModelPruning` does is taken up where an epoch or a validation has ended. Elsewhere
  `torch.nn.utils.prune` is an error.
- `validation_step` under `torch.enable_grad()` may call `torch.autograd.grad`; stock's
  `inference_mode=True` refuses that.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_tables(), TAIL])


def _tables() -> Iterator[str]:
    for section, parts in TABLES.items():
        yield f"## {section}\n"
        yield "| part | works | refused |"
        yield "|---|---|---|"
        for part, cases in parts.items():
            works = "; ".join(case for case, row in cases.items() if not row.refused)
            refused = "; ".join(_refusal(case, row) for case, row in cases.items() if row.refused)
            yield f"| {part} | {works} | {refused} |"
        yield ""


def _refusal(case: str, row: Part) -> str:
    cause, _, instead = row.why.partition("; ")
    return f"{case}: {cause}" + (f" (instead: {instead})" if instead else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
