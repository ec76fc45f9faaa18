"""``fulgurite doctor``: what there is, whether it works, and what to do where it does not."""

from __future__ import annotations

import sys

from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.commands import checkups, processes
from fulgurite.commands.checkups import Finding
from fulgurite.commands.self_test import Outcome, OutOfTime, self_test

_NAME = 11  # the longest name of a finding, and two spaces


def doctor(compile_dir: str | None = None) -> int:
    """Look at everything and print it; returns 0 if all is well, 1 if something must be mended.

    Args:
        compile_dir: the folder of the compile cache; None is the user's.
    """
    wrong = [_tell(checkups.versions())]
    wrong += [_tell(checkups.processor()), _tell(checkups.threads())]
    wrong += [_tell(finding) for finding in (processes.network(), processes.place()) if finding]
    wrong.append(_tell(processes.meets()))
    found, cache = checkups.cache(compile_dir)
    wrong.append(_tell(found))
    with checkups.scratch(cache) as folder:
        cannot_compile = _tell(checkups.compiler(folder))
    if cannot_compile:
        _tell(Finding("self-test", "not run, for nothing can be compiled"))
    else:
        _tell(checkups.header(cache))
        print("  ...  a small training is compiled, some 10 s", flush=True)
        outcome = _tested(cache)
        wrong.append(_tell(checkups.tested(outcome)))
        if outcome is not None:
            print("\n".join(_printable(checkups.picture(outcome, "█"))))
    several = sum([*wrong, cannot_compile])
    print("\nAll is well." if not several else f"\nTo be mended: {several}, see above.")
    return int(bool(several))


def _tested(cache: CompileCache | None) -> Outcome | None:
    try:
        with checkups.scratch(cache) as folder:
            return self_test(folder)
    except OutOfTime:
        return None


def _tell(finding: Finding) -> bool:
    """Print what was found; returns whether it must be mended."""
    state = "MEND" if finding.remedy else "ok"
    print(f"{state:>5}  {finding.name:<{_NAME}}{finding.text}", flush=True)
    if finding.remedy:
        print(f"{'':>5}  {'':<{_NAME}}-> {finding.remedy}", flush=True)
    return bool(finding.remedy)


def _printable(lines: list[str]) -> list[str]:
    """Lines as the screen can show them: block characters and µ are not in every encoding."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        "".join(lines).encode(encoding)
    except UnicodeEncodeError:
        return [line.replace("█", "#").replace("µs", "us") for line in lines]
    return lines
