"""Random parameter files: each loads, or is refused with its places; nothing else may happen.

    python tests/tools/fuzz_files.py --seed 123        one of them, and what became of it
    python tests/tools/fuzz_files.py --examples 10000  many, and a summary

Each begins as a good file or as one of the broken ones. Its text is mutated (lines, indentation,
characters, what YAML treats specially) or what it says (keys and values dropped, misspelt, swapped,
of other types and sizes). A finding is any exception but ParameterFileError, an error without a
place or of more than a line for a problem, and what takes more than two seconds.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.document.reading import read
from fulgurite.config.schema.checking import check

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDER = ROOT / "tests/trainer/config/schema/valid"
LIMIT_S = 2.0

GOOD = [*sorted(FOLDER.glob("*.yaml")), *sorted(EXAMPLES.glob("*.yaml"))]
GOOD = [file for file in GOOD if file.stem != "runner"]  # its script has the model and the data
BROKEN = sorted(FOLDER.with_name("broken").glob("*.yaml"))

SPECIALS = (
    *("\t", "\n", "\r", " ", "  ", ": ", ":", "- ", "-", "? ", ", ", "#", " #", "---\n", "...\n"),
    *("{", "}", "[", "]", "'", '"', "|", ">", "|\n", "%", "%YAML 1.2\n", "@", "`", "\\", "\\x"),
    *("&a ", "*a", "&a", "<<: *a\n", "<<: ", "!!int ", "!!float ", "!!bool ", "!!null ", "!!set "),
    *("!!python/name:os.system ", "!x ", "! ", "!<x> ", "!!merge ", "!!binary ", "!!timestamp "),
    *("${HOME}", "${", "$$", "${FULGURITE_UNSET}", "1e999", "-1e999", ".nan", ".inf", "-.inf"),
    *("0x", "0xF", "0b_", "0b1", "0o9", "007", "1_0", "1__", "9" * 5000, "0x" + "f" * 5000),
    *("~", "null", "yes", "true", "=", "\x00", "\x07", "\ufeff", "\u2028", "\x85", "é", "🙂"),
    *("{" * 60, "[" * 60, "- " * 60, "? " * 60, "[" * 3000, "a" * 3000, '"' + "a" * 3000),
)
WORDS = (
    *("", ".", "a..b", "x", "x" * 5000, "\n", "ä.b", "None", "yes", "nan", "1e-3", "${HOME}"),
    *("class_path", "init_args", "name", "data_processor", "schedulers", "params", "optimizer"),
    *("nets", "nets.Net", "nets.loader", "nets.Nothing", "nothing.Net", "Net", "os.system", "os"),
    *("torch", "torch.nn", "torch.nn.Linear", "torch.optim.SGD", "torch.optim.Optimizer", "SGD"),
    *("Optimizer", "LBFGS", "LambdaLR", "OneCycleLR", "ChainedLR", "MultiplicativeLR", "CyclicLR"),
    *("fulgurite", "fulgurite.Trainer", "lightning.pytorch.Callback", "Callback", "LambdaCallback"),
    *("torchmetrics.Metric", "MetricCollection", "F1Score", "builtins.dict", "builtins.eval"),
    *("max_steps", "eval_frequency", "profiler", "plugins", "strategy", "accelerator", "devices"),
    *("logger", "loggers", "callbacks", "limit_val_batches", "max_time", "gradient_clip_algorithm"),
)


def _deep(levels: int) -> Any:
    value: Any = 0
    for i in range(levels):
        value = [value] if i % 2 else {"a": value}
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, -(10**400), 10**5000),
    *(0.0, 0.5, -0.5, 1.5, 1e300, float("inf"), float("-inf"), float("nan")),
    *([], {}, [[]], [{}], {"a": 1}, {1: 2}, {None: 1}, {True: 1}, {(1, 2): 3}, (1, 2), {""}),
    *([0] * 300, [None], ["a", 1, None], {"": ""}, {"a.b": 1}, _deep(10), _deep(45), _deep(3000)),
    *(b"bytes", object(), len, int, [1e308] * 3, {str(i): i for i in range(300)}),
)


def mutated_text(text: str, rng: random.Random) -> bytes:
    """A file's text with a few changes, at times no longer text."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        text = rng.choice(_CHANGES)(text, rng)
    content = text.encode(rng.choice(("utf-8",) * 30 + ("utf-16", "utf-8-sig", "utf-32")))
    if rng.random() < 0.02:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + bytes([rng.randrange(256)]) + content[at:]
    return content


def _change_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            lines[i] = " " * rng.randint(1, 6) + lines[i]
        case 4:
            lines[i] = lines[i][rng.randint(1, 6) :]
    return "".join(lines)


def _insert(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(SPECIALS) + text[at:]


def _overwrite(text: str, rng: random.Random) -> str:
    at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    end = min(end, at + rng.choice((1, 1, 1, 3, 20)))
    return text[:at] + rng.choice((*SPECIALS, "", "", "", *WORDS)) + text[end:]


def _shorten(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


_CHANGES: tuple[Callable[[str, random.Random], str], ...]
_CHANGES = (_change_line, _change_line, _insert, _overwrite, _overwrite, _shorten)


def mutated_data(data: Any, rng: random.Random) -> Any:
    """What a file says with a few changes."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holders = list(_holders(data))
        if not holders:
            break
        _change_item(*rng.choice(holders), holders, rng)
    return data


def _holders(data: Any, depth: int = 0) -> Any:
    """Each mapping and list with each of its keys."""
    if depth > 30 or not isinstance(data, (dict, list)):
        return
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        yield from _holders(data[key], depth + 1)


def _change_item(holder: Any, key: Any, holders: list[Any], rng: random.Random) -> None:
    match rng.randrange(7):
        case 0:
            del holder[key]
        case 1:
            holder[key] = rng.choice(VALUES)
        case 2:
            holder[key] = rng.choice(WORDS)
        case 3:
            holder[key] = rng.choice(([holder[key]], {rng.choice(WORDS): holder[key]}))
        case 4 if isinstance(holder, dict):
            holder[_misspelt(str(key), rng)] = holder.pop(key)
        case 5 if isinstance(holder, dict):
            holder[rng.choice(WORDS)] = rng.choice((*VALUES, *WORDS))
        case _:
            other, other_key = rng.choice(holders)
            if (isinstance(other, dict) and other_key in other) or (
                isinstance(other, list) and other_key < len(other)
            ):
                holder[key] = other[other_key]  # at times one that contains itself


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice((word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.swapcase()))


def tried(rng: random.Random, folder: Path) -> tuple[str, float]:
    """Check one mutated file: whether it "loads" or is "refused", and the seconds it took.

    Raises:
        AssertionError: it is refused without a place, or takes too long.
    """
    source = rng.choice(GOOD if rng.random() < 0.7 else BROKEN)
    file: Any = folder / "mutated.yaml"
    imports = rng.random() < 0.8
    if rng.random() < 0.6:
        file.write_bytes(mutated_text(source.read_text(encoding="utf-8"), rng))
    else:
        file = mutated_data(_said(source), rng)
    took_s = LIMIT_S
    for _ in range(2):  # what a file names may be imported in the first check of it
        begin = time.process_time()  # whatever else the machine does
        refused = refusal_of(file, imports)
        took_s = min(took_s, time.process_time() - begin)
        if took_s < LIMIT_S:
            break
    assert took_s < LIMIT_S, f"it took {LIMIT_S} s or more, twice"
    if refused is None:
        return "loads", took_s
    told, name = str(refused).split("\n"), "<dict>" if isinstance(file, dict) else str(file)
    assert len(told) == len(refused.problems), f"more than a line for a problem:\n{refused}"
    assert all(line.startswith(name) for line in told), f"no place: {refused}"
    return "refused", took_s


def refusal_of(file: Any, imports: bool) -> ParameterFileError | None:
    """What is wrong with a file, if anything is."""
    try:
        check(file, imports=imports)
    except ParameterFileError as error:
        return error
    return None


def _said(source: Path) -> Any:
    try:
        return read(source).data
    except ParameterFileError:
        return read(GOOD[0]).data


def main() -> int:
    """Run one or many; returns 1 if there are findings."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int)
    options.add_argument("--examples", type=int, default=1000)
    given = options.parse_args()
    seeds = range(given.examples) if given.seed is None else [given.seed]
    sys.path[:0] = [str(FOLDER), str(EXAMPLES)]
    warnings.simplefilter("error")
    outcomes: Counter[str] = Counter()
    slowest_s, slowest, findings = 0.0, 0, 0
    for file in GOOD:  # what they name is imported before anything is timed
        refusal_of(file, imports=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                became, took_s = tried(random.Random(seed), Path(folder))
            except Exception:  # whatever it is, it is a finding
                traceback.print_exc(limit=-4)
                print(f"finding: python tests/tools/fuzz_files.py --seed {seed}\n", file=sys.stderr)
                findings += 1
                continue
            outcomes[became] += 1
            if took_s > slowest_s:
                slowest_s, slowest = took_s, seed
    print(
        f"{len(seeds)} files: {outcomes['loads']} load, {outcomes['refused']} are refused,"
        f" {findings} findings; the slowest took {slowest_s:.2f} s (seed {slowest})"
    )
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
