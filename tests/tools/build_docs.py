"""Build the site of docs/ and README.md into site/; a broken link or anchor is an error.

    make docs        or, where Zensical is installed:        python tests/tools/build_docs.py

The pages' links are those of the repository's view. For the site README.md becomes its first page,
and each file outside docs/ that a page links to becomes a page that shows it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "pages"
SITE = ROOT / "site"

ERRORS = "trainer/explanations"
"""A page for each error: part of the package, and linked from ``errors.md`` alone."""

NAV = {
    "Begin": ("first_ten_minutes",),
    "How to": (
        *(
            "finetuning",
            "reinforcement_learning",
            "variable_lengths",
            "ctc",
            "generative_models",
            "gans",
        ),
        *("metrics", "checkpoints", "notebooks"),
    ),
    "A step": ("steps", "idioms", "errors", "optimizers", "schedules", "precision", "cbfloat16"),
    "A run": (
        *("parameter_files", "callbacks", "lightning_parts", "runners", "loops", "backends"),
        *(
            "distributed",
            "weight_streaming",
            "scaling",
            "report",
            "autogen",
            "kernel_library",
            "what_pays",
            "speed",
            "costs",
        ),
    ),
    "The project": ("reliability", "security", "private_names", "contributing", "mutants"),
}
"""Section -> pages of docs/; one that does not exist is left out."""

LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]*)(#[^)\s]*)?(?=\))")
"""Path and anchor of a relative link."""

PICTURE = re.compile(r'(?:(?<= src=")|(?<=srcset="))([^":]*)()(?=")')
"""Path of a picture in HTML, as Markdown has none that is light or dark; it has no anchor."""


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with ``change`` applied to what is in no code, fenced, indented or in backticks."""
    code = r"(^```.*?^```$|(?:(?<=\n\n)|\A)(?: {4}[^\n]*\n|\n(?= {4}))+|`[^`\n]+`)"
    parts = re.split(code, text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Path and anchor of each relative link of a page; either may be empty."""
    found: list[tuple[str, str]] = []

    def note(part: str) -> str:
        both = (*LINK.findall(part), *PICTURE.findall(part))
        found.extend((path, anchor[1:]) for path, anchor in both)
        return part

    outside_code(text, note)
    yield from found


def anchors(text: str) -> set[str]:
    """The anchors of a page: those of its headings, as GitHub makes them, and its own."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    slugs: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", without, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        taken = (slug, *(f"{slug}-{i}" for i in range(1, 1000)))
        slugs.add(next(name for name in taken if name not in slugs))
    return slugs | set(re.findall(r'<a (?:id|name)="([^"]+)"', without))


def pages() -> dict[str, str]:
    """The sources of the site: path in the repository -> text."""
    docs = ROOT / "docs"
    errors = sorted((ROOT / ERRORS).glob("*.md"))
    paths = [ROOT / "README.md", *sorted(docs.glob("*.md")), *errors]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def target(source: str, path: str) -> str:
    """Where a link of a page leads, as a path in the repository; an empty one is the page."""
    return os.path.normpath(PurePosixPath(source).parent / path) if path else source


def place(path: str) -> str:
    """The file of the site that shows a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(ERRORS):
        return f"errors/{PurePosixPath(path).name}"
    return f"{path}.md"


def stage() -> None:
    """Write the pages as the site has them, and the pictures beside them."""
    shutil.rmtree(STAGE, ignore_errors=True)
    (STAGE / "docs").mkdir(parents=True)
    shown: set[str] = set()
    for source, text in pages().items():
        at = PurePosixPath(place(source))

        def moved(link: re.Match[str], source: str = source, at: PurePosixPath = at) -> str:
            led = target(source, link[1])
            if not led.startswith(("docs/", ERRORS)) and led != "README.md":
                shown.add(led)
            return f"{os.path.relpath(place(led), at.parent)}{link[2] or ''}"

        changed = outside_code(text, partial(LINK.sub, moved))
        changed = outside_code(changed, partial(PICTURE.sub, moved))
        (STAGE / "docs" / at).parent.mkdir(exist_ok=True)
        (STAGE / "docs" / at).write_text(changed, encoding="utf-8")
    for path in sorted(shown):
        kind = {"py": "python", "yaml": "yaml"}.get(path.rpartition(".")[2], "text")
        code = (ROOT / path).read_text(encoding="utf-8")
        page = STAGE / "docs" / place(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"# {path}\n\n~~~~{kind}\n{code}~~~~\n", encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, STAGE / "docs")


def navigation() -> list[dict[str, object]]:
    """The site's navigation; a page of docs/ that is not in NAV is an error."""
    there = {path.stem for path in (ROOT / "docs").glob("*.md")}
    lost = there - {name for names in NAV.values() for name in names}
    if lost:
        raise SystemExit(f"NAV in {Path(__file__).name} lacks pages of docs/: {sorted(lost)}")
    sections = {s: [f"{n}.md" for n in names if n in there] for s, names in NAV.items()}
    return [{"Fulgurite": "index.md"}, *({name: files} for name, files in sections.items())]


def configuration() -> str:
    """The generator's, in YAML: JSON is YAML."""
    slugs = {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}}
    return json.dumps(
        {
            "site_name": "Fulgurite",
            "docs_dir": "docs",
            "site_dir": "site",
            "nav": navigation(),
            "theme": {"font": False, "features": ["navigation.sections", "content.code.copy"]},
            "markdown_extensions": [
                *("tables", "attr_list", "md_in_html"),
                *("pymdownx.highlight", "pymdownx.superfences"),
                {"toc": {"permalink": True, "slugify": slugs}},
            ],
        },
        indent=1,
    )


def main() -> int:
    """Return the generator's status."""
    if importlib.util.find_spec("zensical") is None:
        raise SystemExit('the generator is not installed: pip install -e ".[docs]"')
    stage()
    (STAGE / "mkdocs.yml").write_text(configuration(), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    status = subprocess.run([*command, "-f", "mkdocs.yml"], cwd=STAGE, check=False).returncode
    if status == 0:
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.move(STAGE / "site", SITE)
        print(f"site: {SITE / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
