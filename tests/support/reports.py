"""Reports for tests: of real programs, and one with all that a page can show."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import fit
from models import Classifier, loader, mlp
from torch import nn

HOSTILE = "</code></script><script>alert('x')</script><img src=x onerror=alert(1)>&\"'"
"""What a user may have written into a name, a line or a string."""

OF_ENTRY = ("modules", "memory", "kernels", "operations", "passes", "roofline", "systems")
OF_PROGRAM = ("warnings", "building")
"""Sections of the page, of each entry point and of each program, by their keys."""

SOURCE = f"""\
// {HOSTILE}
extern "C" void kernel_0123456789abcdef(const float* in_ptr0, float* out_ptr0) {{
    for (int64_t x0 = 0; x0 < 128L; x0 += 16) out_ptr0[x0] = in_ptr0[x0] < 0 ? 0 : in_ptr0[x0];
}}
"""


class Validated(Classifier):
    """A classifier with a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log a loss."""
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def built(folder: Path, net: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """The report of a short fit with validation; ``options`` are of ``harness.fit``."""
    backend = {"artifact_dir": folder, **options.pop("backend", {})}
    fit(
        lambda: Validated(net if net is not None else mlp(0.1)),
        lambda: (loader(64), loader(32)),
        static=True,
        backend=backend,
        **options,
    )
    return read(folder)


@functools.cache
def accumulated() -> dict[str, Any]:
    """The report of a fit whose gradients accumulate, built once; nobody changes it."""
    with tempfile.TemporaryDirectory() as folder:
        return built(Path(folder), policy="disabled", accumulate_grad_batches=2)


def read(folder: Path) -> dict[str, Any]:
    """The report in a folder."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def full(report: dict[str, Any]) -> dict[str, Any]:
    """A report with what operation by operation has none of: generated and tuned kernels,
    machines, warnings; and names that would break a page that escapes nothing.
    """
    report = copy.deepcopy(report)
    program = report["programs"][-1]
    program["reason"] = f"number 2, since {HOSTILE}"
    program["warnings"] = [
        {"category": "FrozenValueWarning", "text": f"{HOSTILE}\nread once", "place": "net.py:3"}
    ]
    entry = program["entries"][-1]
    call = entry["calls"][2]
    call |= {"kernel": "kernel_0123456789abcdef", "maker": "generated", "tuned": "best of 5"}
    call["region"] = "CrossEntropyLoss forward"
    entry["calls"][3]["maker"] = "host"
    entry["gathered"] = [{"name": HOSTILE, "size_bytes": 4096, "gathers": 2, "held": False}]
    entry["sources"] = {call["kernel"]: SOURCE}
    entry["calling"] = f"def call(inputs):\n    # {HOSTILE}\n    {call['kernel']}(buf0, buf1)\n"
    entry["seconds"] = {"generate": 1.25, "compile": 3.5}
    for i in call["operations"]:
        entry["operations"][i] |= {"maker": "generated", "source": HOSTILE, "module": HOSTILE}
    entry["modules"][0]["module"] = "a.very.long.name.of.a.module." * 8
    entry["roofline"] = [
        {
            "system": system,
            "systems": systems,
            "batch_size": 16 * times,
            "compute_s": 1e-6 * times / systems,
            "memory_s": 3e-6,
            "weights_s": 1e-5 if systems == 16 else 0.0,
            "bound": "weight streaming" if systems == 16 else "memory",
        }
        for system in ("this machine", "CS-2", "CS-3")
        for systems in ((1,) if system == "this machine" else (1, 4, 16))
        for times in (1, 4, 16)
    ]
    return report
