"""Type-check the installed package, strictly: an editable install is invisible to type checkers.

    python tests/tools/check_types.py

Builds the wheel, unpacks it, and runs mypy on what users would import.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Return mypy's exit status."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would ship what lies there
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(ROOT)],
            check=True,
        )
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(folder, "site"))
        return subprocess.run(
            [
                *(sys.executable, "-m", "mypy", "-p", "fulgurite"),
                *("--config-file", str(ROOT / "pyproject.toml")),
                *("--cache-dir", str(ROOT / ".mypy_cache")),
            ],
            env={**os.environ, "MYPYPATH": str(Path(folder, "site"))},
            cwd=folder,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
