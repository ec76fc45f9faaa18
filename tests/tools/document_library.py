"""Write docs/kernel_library.md from the table of the kernel library.

python tests/tools/document_library.py
"""

from __future__ import annotations

from pathlib import Path

from fulgurite.backends.csx.compile.host.library import LIBRARY

PAGE = Path(__file__).parents[2] / "docs" / "kernel_library.md"
SOURCE = "https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native"

HEAD = f"""# The kernel library

A wafer has a library of hand-written kernels. An operation of a program is one of them, or is
generated for the program, or runs on the host; `autogen_policy` says which
([autogen](autogen.md)). Here the library are torch's kernels for the CPU, for {len(LIBRARY)}
operations, of decomposed graphs above all: `mish`, for one, is `exp`, `log1p`, `tanh` and a product
there. A step that is not compiled runs as it was traced: `mish` is one operation of torch's there,
and on the host's path.

It lacks, among what models use: `acos`, `asin`, `atan`, `atan2`, `tan`, `sinh`, `cosh` and their
inverses, `erfinv`, `lgamma`, `digamma`, `polygamma`, `exp2`, `log2`, `log10`, `hypot`, `prod`,
`cumsum`, `cumprod`, `logcumsumexp`, `flip`, `roll`, `tril`, `triu`, `sort`, `topk`, `kthvalue`,
`median`, `bucketize`, `searchsorted`, `cdist`, `grid_sampler`, `fft` and `linalg`.

The table is `backends/csx/compile/host/library.py`: an operation that is taken out moves to the
host's path, under `disabled` whatever it is, under the others where no kernel is generated for it.
This page is made from it by `tests/tools/document_library.py`; a test looks up each function in
torch.

| operation | kernel | source |
|---|---|---|
"""


def page() -> str:
    """The page."""
    rows = [
        f"| `{name}` | `{kernel.function}` | [{kernel.source}]({SOURCE}/{kernel.source}) |\n"
        for name, kernel in LIBRARY.items()
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
