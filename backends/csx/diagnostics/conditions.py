"""What to write where Python asks a tensor for its truth: it depends on the line and its branch."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable

from fulgurite.backends.csx.diagnostics.user_lines import UserLine

_CHOSEN_BY = {
    "max": "torch.maximum(a, b)",
    "min": "torch.minimum(a, b)",
    "sorted": "torch.stack([a, b]).sort().values",
    "any": "torch.where(x.any(), a, b)",
    "all": "torch.where(x.all(), a, b)",
}
"""Functions of Python's that ask tensors for their truth, and what to write for them."""
_TRUNCATED = (
    "the same distribution without drawing again:\n"
    "      lo, hi = (math.erf((bound - mean) / (std * 2**0.5)) for bound in (a, b))\n"
    "      x.uniform_(lo, hi).erfinv_().mul_(std * 2**0.5).add_(mean)"
)
_ASSERT = (
    "torch.where for a choice; to look at values, a step closure:\n"
    "      @fulgurite.step_closure\n"
    "      def check(ok):  # runs on the host after every step: check(condition)\n"
    "          assert ok"
)
_BY_BATCH = (
    "      def on_train_batch_start(self, batch, batch_idx):  # on the host, before the step\n"
    "          self.skip = bool(condition)  # of the batch\n"
    "      if self.skip:  # in training_step\n"
    "          return None"
)
_SKIP = (
    "to leave out steps whose loss or gradients are not finite, a callback (torch.where on the"
    " loss\n    still gives NaN gradients, for 0 * NaN is NaN); it leaves out whole windows of"
    " accumulation:\n"
    "      Trainer(callbacks=[fulgurite.callbacks.CheckLoss(max_consecutive_skips=10)])\n"
    "    for a batch that holds such values:\n"
    f"{_BY_BATCH}\n"
    "    for a value that no gradient comes from: torch.nan_to_num(x), torch.where(condition, a, b)"
)
_LEFT_OUT = (
    "a batch is left out for its values by a hook:\n"
    f"{_BY_BATCH}\n"
    "    for its loss, with gradients of zero, by which the optimizer still steps:\n"
    "      loss = torch.where(condition, 0.0, loss)"
)
_STOP = (
    "after the step, on the host:\n"
    "      def on_train_batch_end(self, outputs, batch, batch_idx):\n"
    '          if outputs["loss"] < 0.1:  # your condition\n'
    "              self.trainer.should_stop = True"
)
_SHOW = (
    "to look at values, a step closure:\n"
    "      @fulgurite.step_closure\n"
    "      def show(value):  # runs on the host after every step: show(x)\n"
    "          if value > 1:  # your condition\n"
    "              print(value.item())"
)
_BRANCHES = {
    r"return(\s+None)?\s*(#.*)?": _LEFT_OUT,
    r".*\bshould_stop\s*=\s*True.*": _STOP,
    r"(print|logging\.\w+|\w*log(ger)?\.\w+|warnings\.warn)\(.*": _SHOW,
}
"""What a branch begins with, and what helps there."""

_ASKS = re.compile(r"\b(if|elif|while|assert)\b(?:(?!\belse\b)[^:])*(\.item\(|\b(float|int)\()")


def asks(line: UserLine) -> bool:
    """Whether the value that a line reads is for a condition: ``if loss.item() > 3:``."""
    return _ASKS.search(line.source) is not None


def choice(line: UserLine, torchs: Iterable[str]) -> str:
    """The remedy for a line that asks a tensor for its truth; empty where ``torch.where`` will do.

    Args:
        line: the user's.
        torchs: names of torch's functions that it called, if it is one of them that asks.
    """
    if "trunc_normal_" in torchs:
        return _TRUNCATED
    if re.search(r"\bassert", line.source):
        return _ASSERT
    if re.search(r"\bis_?(nan|finite|inf)\(", line.source):
        return _SKIP
    branch = line.source.rpartition(":")[2].strip() or linecache.getline(line.file, line.line + 1)
    for begins, remedy in _BRANCHES.items():
        if re.match(r"\s*(el)?if\b", line.source) and re.fullmatch(begins, branch.strip()):
            return remedy
    found = re.search(rf"(?<![\w.])({'|'.join(_CHOSEN_BY)})\(", line.source)
    if found is None:
        return ""
    return f"for {found[1]}(...), in tensor operations:\n      {_CHOSEN_BY[found[1]]}"
