"""One program in a process of its own; see the package."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import defaults
from programs import difference, every_program


def main() -> int:
    """Return 1 where a program's results differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="list, or field.program")
    parser.add_argument("--interpreted", action="store_true", help="operation by operation")
    given = parser.parse_args()
    if given.name == "list":
        print(*every_program(), sep="\n")
        return 0
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    policy = "disabled" if given.interpreted else "default"
    defaults.update(autogen_policy=policy, audit=True)
    torch.set_num_threads(1)
    wrong = difference(given.name)
    print(wrong or "equal")
    return wrong is not None


if __name__ == "__main__":
    sys.exit(main())
