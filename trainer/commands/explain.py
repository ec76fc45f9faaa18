"""``fulgurite explain``: a page for each error, as ``docs/errors.md`` lists them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files


def explain(names: Sequence[str]) -> int:
    """Print the page of each error, or the names of all; returns the exit status."""
    pages = {
        one.name.removesuffix(".md"): one
        for one in files("fulgurite").joinpath("explanations").iterdir()
    }
    if not names:
        print("\n".join(sorted(pages)))
        return 0
    folded = {name.casefold(): name for name in pages}
    for given in names:
        asked = given.rpartition(".")[2].casefold()  # fulgurite.errors.HostRead too
        if asked not in folded:
            near = [folded[one] for one in get_close_matches(asked, folded)]
            guess = f" Did you mean {' or '.join(near)}?" if near else ""
            print(
                f"fulgurite explain: there is no error {given!r}.{guess} Without a name all are"
                " listed.",
                file=sys.stderr,
            )
            return 1
        text = pages[folded[asked]].read_text(encoding="utf-8")
        print(re.sub(r'<a id="\w+"></a>', "", text))
    return 0
