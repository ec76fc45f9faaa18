"""The table of a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Column = Literal["Type", "Name", "Dtype", "Shape", "# Elements", "Size", "% of Total", "Trainable"]
COLUMNS: tuple[str, ...] = Column.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter, a buffer, or a group of them.

    Args:
        kind: "parameter", "buffer" or "group".
        name: in the module, or the group's.
        tensors: what it is made of.
    """

    kind: str
    name: str
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has; of a lazy parameter none are known."""
        return sum(0 if is_lazy(t) else t.numel() for t in self.tensors)

    @property
    def size_bytes(self) -> int:
        """How large it is."""
        return sum(0 if is_lazy(t) else t.nbytes for t in self.tensors)

    @property
    def trainable(self) -> int:
        """How many of its numbers are trained."""
        return sum(t.numel() for t in self.tensors if t.requires_grad and not is_lazy(t))

    def cells(self, total: int) -> dict[str, tuple[object, str]]:
        """What to sort by and what to show, for each column."""
        one = self.tensors[0] if self.kind != "group" and not is_lazy(self.tensors[0]) else None
        shape = "-" if one is None else str(tuple(one.shape))
        dtype = "-" if one is None else str(one.dtype).removeprefix("torch.")
        part = 100 * self.elements / total if total else 0.0
        requires = {t.requires_grad for t in self.tensors}
        trained = "in part" if len(requires) > 1 else "yes" if requires == {True} else "no"
        shown = (self.kind, self.name, dtype, shape)
        numbers = (
            (self.elements, f"{self.elements:,}"),
            (self.size_bytes, human(self.size_bytes)),
            (part, f"{part:.2f}"),
        )
        cells = [*((text, text) for text in shown), *numbers, (trained, trained)]
        return dict(zip(COLUMNS, cells, strict=True))


class CountParams(pl.Callback):
    """Prints how many parameters and buffers a model has, as a table, before training.

    Args:
        search_and_replace: pairs of a regular expression and a replacement for names; parameters
            that get one name by them are one row, a group. For instance
            ``[["layers[.][0-9]+[.]", "layers.*."]]``.
        order_by: a column, or several, to sort by: Type, Name, Dtype, Shape, # Elements, Size,
            % of Total, Trainable. None keeps the module's order.
        descending: the largest first.

    Attributes:
        text: what was printed last.
    """

    def __init__(
        self,
        search_and_replace: list[tuple[str, str]] | None = None,
        order_by: Column | list[Column] | None = None,
        descending: bool = False,
    ) -> None:
        self.replacements = [_compiled(pair) for pair in search_and_replace or []]
        self.order_by = [order_by] if isinstance(order_by, str) else list(order_by or [])
        for column in self.order_by:
            if column not in COLUMNS:
                raise ValueError(
                    f"CountParams: there is no column {column!r} to order by. The columns are"
                    f" {', '.join(COLUMNS)}."
                )
        self.descending = descending
        self.text = ""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print."""
        self.text = self.table(pl_module)
        rank_zero_only(print)(self.text)

    def table(self, module: nn.Module) -> str:
        """The table, and the totals below it."""
        rows = self.rows(module)
        total = sum(row.elements for row in rows)
        cells = [row.cells(total) for row in rows]
        if self.order_by:
            cells.sort(key=lambda row: [row[c][0] for c in self.order_by], reverse=self.descending)
        lines = _aligned([list(COLUMNS), *([text for _, text in row.values()] for row in cells)])
        parameters = [row for row in rows if row.kind != "buffer"]
        trained = sum(row.trainable for row in parameters)
        trained_bytes = sum(
            t.nbytes
            for row in parameters
            for t in row.tensors
            if t.requires_grad and not is_lazy(t)
        )
        size = human(sum(row.size_bytes for row in rows))
        lines += ["", f"Total: {total:,} elements, {size}, buffers included."]
        lines += [f"Trainable: {trained:,} elements, {human(trained_bytes)}."]
        return "\n".join(lines)

    def rows(self, module: nn.Module) -> list[Row]:
        """One row for each tensor or group, in the module's order."""
        groups: dict[str, list[Row]] = {}
        for kind, named in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        ):
            for name, tensor in named:
                renamed = name
                for pattern, replacement in self.replacements:
                    renamed = pattern.sub(replacement, renamed)
                groups.setdefault(renamed, []).append(Row(kind, name, (tensor,)))
        return [_merged(name, rows) for name, rows in groups.items()]


def _merged(name: str, rows: Sequence[Row]) -> Row:
    if rows[0].name == name and len(rows) == 1:
        return rows[0]
    return Row("group", name, tuple(tensor for row in rows for tensor in row.tensors))


def _compiled(pair: Sequence[str]) -> tuple[re.Pattern[str], str]:
    try:
        pattern, replacement = pair
        return re.compile(pattern), replacement
    except (re.error, ValueError, TypeError) as error:
        raise ValueError(
            "CountParams: search_and_replace takes pairs of a regular expression and a replacement;"
            f' got {pair!r} ({error}). For instance [["layers[.][0-9]+[.]", "layers.*."]].'
        ) from None


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {COLUMNS.index(name) for name in ("# Elements", "Size", "% of Total")}
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def human(size_bytes: float) -> str:
    """``24.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
