"""Write ``docs/errors.md`` and a page for each error: its cause, and each misuse that ends in it,
with what we say, what others say, and what to write instead.

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

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS.parent / "trainer" / "explanations"
_LED = "../trainer/explanations"
_WORDS = Path(__file__).parents[1] / "support" / "misuses"


def words(name: str) -> str:
    """A text that is written by hand: the head of the index, or what is said of programs."""
    return (_WORDS / f"{name}.md").read_text(encoding="utf-8").strip()


def causes() -> dict[str, str]:
    """Of each error, by its name: the cause, and how it is on a wafer."""
    _, *sections = re.split(r"^# (\w+)$", words("causes"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(sections[::2], sections[1::2], strict=True)}


def name_of(row: Misuse) -> str:
    """The class that a misuse ends in."""
    return FrozenValueWarning.__name__ if row.warns else row.error


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
    parts = [f'## <a id="{row.name}"></a>{row.title}', f"Rule `{row.rule}`."]
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


def index() -> str:
    """``docs/errors.md``: each misuse with its rule, and a link to its section."""
    lines = ["## Contents", "", "| in the step | rule | page |", "|---|---|---|"]
    for row in (row for rows in TABLE.values() for row in rows):
        link = f"{_LED}/{name_of(row)}.md"
        lines.append(f"| [{row.title}]({link}#{row.name}) | `{row.rule}` | `{name_of(row)}` |")
    others = sorted(causes().keys() - {name_of(row) for rows in TABLE.values() for row in rows})
    links = ", ".join(f"[{name}]({_LED}/{name}.md)" for name in others)
    return "\n\n".join([words("head"), "\n".join(lines), f"And without a program: {links}."]) + "\n"


def page(name: str, sections: list[str]) -> str:
    """The page of an error; ``sections`` are those of its programs."""
    programs = [words("programs"), *sections] if sections else []
    return "\n\n".join([f"# {name}", causes()[name], *programs]) + "\n"


def documents(folder: Path) -> dict[Path, str]:
    """The index and all pages."""
    sections: dict[str, list[str]] = {name: [] for name in causes()}
    for row in (row for rows in TABLE.values() for row in rows):
        sections[name_of(row)] += [ours(row, run(row.bad, folder)), theirs(row, folder)]
    found = {PAGES / f"{name}.md": page(name, own) for name, own in sections.items()}
    return {DOCS / "errors.md": index(), **found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        written = documents(Path(scratch))
    PAGES.mkdir(exist_ok=True)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"{DOCS / 'errors.md'} and {len(written) - 1} pages")
