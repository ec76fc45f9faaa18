"""Write ``docs/errors.md``: each misuse, what we say, what others say, and what to write instead.

    python tests/tools/document_errors.py

It needs JAX (the extra ``bench``). A test holds the part that is ours to what the code says now.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning

sys.path.append(str(Path(__file__).parents[1] / "support"))
from misuses.elsewhere import jax_jit, plain_pytorch, torch_compile
from misuses.program import Misuse, Outcome, run
from misuses.table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
_HEAD = Path(__file__).parents[1] / "support" / "misuses" / "head.md"


def message(row: Misuse, outcome: Outcome) -> str:
    """What we say, with the file named ``model.py`` wherever it lies."""
    if row.warns:
        [text] = {str(w.message) for w in outcome.warnings if w.category is FrozenValueWarning}
        kind = FrozenValueWarning.__name__
    else:
        text, kind = str(outcome.error), type(outcome.error).__name__
    for path in (str(outcome.file), os.path.relpath(outcome.file)):
        text = text.replace(path, "model.py")
    drawn = r"(its value, )\d+\.\d{3,}"  # by a clock or a generator
    text = re.sub(drawn, r"\g<1>0.123", text)
    return f"{kind}: {text}"


def ours(row: Misuse, outcome: Outcome) -> str:
    """The part of a row's section that is ours: the program, the message, the corrected one."""
    parts = [f'### <a id="{row.name}"></a>{row.title}', f"Rule `{row.rule}`."]
    parts += [_block(row.bad.shown(), "python"), _block(message(row, outcome), "text")]
    if row.good is not None:
        parts += ["Instead:", _block(row.good.shown(), "python")]
    return "\n\n".join(parts)


def _block(text: str, language: str) -> str:
    return f"```{language}\n{text or '# nothing: see the remedy'}\n```"


def theirs(row: Misuse, folder: Path) -> str:
    """What others say, a line each."""
    said = {
        "PyTorch": plain_pytorch(row, folder),
        "torch.compile": torch_compile(row, folder),
        "JAX": jax_jit(row),
    }
    lines = [f"- *{who}*: {_quoted(text, folder)}" for who, text in said.items()]
    return "\n".join(lines)


def _quoted(text: str, folder: Path) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x...", text.replace(str(folder), ""))
    return text if ":" not in text else f"`` {text} ``"


def _contents() -> str:
    """Each misuse with its rule and class, and a link to its section."""
    lines = ["## Contents", "", "| in the step | rule | class |", "|---|---|---|"]
    for rows in TABLE.values():
        lines += [f"| [{row.title}](#{row.name}) | `{row.rule}` | `{row.error}` |" for row in rows]
    return "\n".join(lines)


def document(folder: Path) -> str:
    """The whole page."""
    parts = [_HEAD.read_text(encoding="utf-8").rstrip(), _contents()]
    for group, rows in TABLE.items():
        parts.append(f"## {group}")
        for row in rows:
            parts += [ours(row, run(row.bad, folder)), theirs(row, folder)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        text = document(Path(folder))
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: {len(text.splitlines())} lines")
