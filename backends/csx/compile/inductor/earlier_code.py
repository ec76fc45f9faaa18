"""What earlier compilations left, by content: so that a changed model compiles what changed.

The code that the compiler generates for a part is kept in a cache of its own, in ``parts`` beside
the programs, as soon as it is there: it is most of the work, and a process that ends before its
kernels are compiled has not done it in vain. A compiled kernel lies in the program that it was
first compiled for. Its name is made of its content; another program that has it copies its module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.inductor.headers import Headers
from fulgurite.backends.csx.compile.inductor.kernel_modules import module_file
from fulgurite.backends.csx.compile.programs import steps
from fulgurite.backends.csx.compile.programs.kernels import INDEX
from fulgurite.backends.csx.compile.programs.parts import Part
from fulgurite.backends.csx.compile.programs.steps import Generated
from fulgurite.backends.csx.compile.store.cache import CompileCache
from fulgurite.backends.csx.compile.store.entries import is_whole
from fulgurite.backends.csx.compile.store.fingerprint import environment
from fulgurite.backends.csx.compile.store.upkeep import entries_in
from fulgurite.backends.torch_compiler import vector_units

FOLDER = "parts"
SHARE = 8  # of the bytes that programs may take, parts may take one in so many more
_PART, _CONSTANTS = "part.json", "constants.pt"


class EarlierCode:
    """What compiled programs and generated code there are.

    Args:
        programs: the cache of programs.
        threads: how many compute the program that is compiled: loops are for so many.
    """

    def __init__(self, programs: CompileCache, threads: int) -> None:
        self._programs, self.threads = programs, threads
        self._environment = "\n".join([*environment(), f"threads {threads}"])

    @property
    def headers(self) -> Headers:
        """Torch's header, where it was read before."""
        return Headers(self._programs.folder)

    def part(
        self,
        part: Part,
        generate: Callable[[Part], Generated],
    ) -> Generated:
        """The code of a part, kept or generated.

        Raises:
            OSError: the folder takes no files.
        """
        cache = CompileCache(self._programs.folder / FOLDER, share=SHARE)
        # results lie as the graph says only where other parts read them: else it is other code
        how = f"{part.read_by_others} {part.policy} {sorted(part.library)}"
        key = self._digest(f"{how} {part.text}")
        return cache.fetch_here(key, lambda folder: _write(generate(part), folder), _read).value

    def name_of(self, source: str) -> str:
        """The name of a kernel among those of all programs."""
        return f"kernel_{self._digest(source)[:32]}"

    def copy_into(self, wanted: set[str], folder: Path) -> list[list[str]]:
        """Copy modules of other programs that have wanted kernels into a folder.

        Returns:
            The wanted kernels in each of them.
        """
        copied: list[list[str]] = []
        missing = set(wanted)
        # a module is copied whole, so those with the most of what is wanted come first
        for module, names in sorted(self._modules(missing), key=lambda one: -len(one[1])):
            useful = sorted(missing & names)
            if useful:
                with contextlib.suppress(OSError):  # removed by another process
                    # its code will be run: damage is looked for as where a program is loaded
                    if is_whole(module.parent):
                        shutil.copyfile(module, module_file(folder, len(copied)))
                        copied.append(useful)
                        missing -= names
        return copied

    def _modules(self, wanted: set[str]) -> Iterator[tuple[Path, set[str]]]:
        """The modules of all programs, with the wanted kernels in each, if any."""
        folder = self._programs.folder
        for entry in (folder / found.key for found in reversed(entries_in(folder))):
            try:
                modules = json.loads((entry / INDEX).read_text())["kernels"]
            except (OSError, ValueError, KeyError):  # of another version, or damaged
                continue
            for i, names in enumerate(modules):
                if found := wanted.intersection(names):
                    yield module_file(entry, i), found

    def _digest(self, text: str) -> str:
        parts = (self._environment, f"vectors {vector_units.pick_vec_isa()}", text)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write(code: Generated, folder: Path) -> None:
    kept = {"program": steps.plain(code.program), "sources": code.sources}
    (folder / _PART).write_text(json.dumps(kept))
    if code.constants:
        torch.save(code.constants, folder / _CONSTANTS)


def _read(folder: Path) -> Generated:
    constants = folder / _CONSTANTS
    found = torch.load(constants, weights_only=True) if constants.exists() else {}
    kept = json.loads((folder / _PART).read_text())
    return Generated(steps.typed(kept["program"]), kept["sources"], found)
