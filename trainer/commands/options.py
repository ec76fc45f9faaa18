"""What may be typed after ``fulgurite cache``, ``compile``, ``explain``, ``report`` and so on.

And the versions, which ``--version`` tells without an import of torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
from typing import Any

import fulgurite

PACKAGES = ("torch", "lightning", "torchmetrics")
COMMANDS = ("doctor", "explain", "cache", "compile", "report", "diff", "checkpoint")
CACHE = {
    "list": "what is compiled already, and how large and old it is",
    "prune": "remove what was used longest ago, past the cache's limit or the one given",
    "clear": "remove all compiled programs",
}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_commands(commands: Any, add_debug: Any) -> None:
    """Add them to the commands of a parser.

    Args:
        commands: what ``add_subparsers`` returned.
        add_debug: adds ``--debug`` to a command.
    """
    doctor = commands.add_parser(
        "doctor",
        help="say whether this machine compiles programs, and what to mend",
        description="Say whether this machine compiles programs, and what to mend.",
    )
    explain = commands.add_parser(
        "explain",
        help="what an error means, and what to write instead",
        description="What an error means, with programs that end in it and what to write instead.",
    )
    explain.add_argument(
        "names", nargs="*", metavar="NAME", help="as HostRead; none: list all there are"
    )
    add_debug(explain)
    cache = commands.add_parser(
        "cache",
        help="list, prune or clear the compiled programs",
        description="Compiled programs that are kept for the next run.",
    )
    kinds = cache.add_subparsers(dest="what", required=True, metavar="list|prune|clear")
    for name, does in CACHE.items():
        kind = kinds.add_parser(name, help=does, description=f"{does}.".capitalize())
        if name == "prune":
            kind.add_argument(
                "--days", type=_days, metavar="N", help="remove what was not used for N days"
            )
            kind.add_argument(
                "--size",
                type=_bytes,
                metavar="SIZE",
                help="keep programs of so many bytes, as 500M or 2G; default: the cache's limit",
            )
        add_debug(kind)
        _add_compile_dir(kind)
        kind.set_defaults(parser=kind)
    compiles = commands.add_parser(
        "compile",
        help="compile what a script or a parameter file trains, and train nothing",
        description="Compile what a script or a parameter file trains, and train nothing: its next"
        " run is compiled from the first step on.",
    )
    add_debug(compiles)
    compiles.add_argument("script", metavar="SCRIPT.py|PARAMS.yaml")
    compiles.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="the script's own arguments; or options of fulgurite fit",
    )
    add_debug(doctor)
    _add_compile_dir(doctor)
    of = "the artifact_dir of a run, or its report.json"
    report = commands.add_parser(
        "report",
        help="what a run's programs are made of and what they cost",
        description="What a run's programs are made of and what they cost; report.html has more.",
    )
    report.add_argument("folder", metavar="DIR", help=of)
    diff = commands.add_parser(
        "diff",
        help="what a change did to graph, kernels and cost: two reports side by side",
        description="What a change did to graph, kernels and cost: two reports side by side.",
    )
    diff.add_argument("before", metavar="A", help=of)
    diff.add_argument("after", metavar="B", help=of)
    add_debug(report)
    add_debug(diff)
    _add_checkpoint(commands, add_debug)


def _add_checkpoint(commands: Any, add_debug: Any) -> None:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="make one file of a checkpoint in parts, or parts of a file",
        description="Checkpoints of weight streaming, which are folders with parts.",
    )
    does = "one Lightning file of a checkpoint in parts; or parts of a file, with --parts"
    convert = checkpoint.add_subparsers(dest="what", required=True, metavar="convert").add_parser(
        "convert",
        help=f"make {does}",
        description=f"Make {does}. It takes about as much memory as the largest tensor.",
    )
    convert.add_argument("source", metavar="SOURCE", help="the checkpoint that is read")
    convert.add_argument("target", metavar="TARGET", help="the new one; nothing has its name yet")
    convert.add_argument(
        "--parts", type=_count, metavar="N", help="cut a file into N parts, as of N processes"
    )
    add_debug(convert)
    convert.set_defaults(parser=convert)


def is_parameter_file(name: str) -> bool:
    """Whether a file is one, by its name."""
    return name.endswith((".yaml", ".yml"))


def run_command(options: argparse.Namespace) -> int:
    """Run the command that was typed; returns its exit status."""
    if options.command == "doctor":
        from fulgurite.commands.doctor import doctor

        return doctor(options.compile_dir)
    if options.command == "explain":
        from fulgurite.commands.explain import explain

        return explain(options.names)
    if options.command == "compile":
        if is_parameter_file(options.script):
            from fulgurite.cli import compile_file

            debug = ["--debug"] if options.debug else []
            return compile_file(options.script, [*options.arguments, *debug])
        from fulgurite.commands.programs import compile_script

        return compile_script(options.script, options.arguments)
    if options.command in ("report", "diff"):
        from fulgurite.commands.programs import diff, report

        if options.command == "report":
            return report(options.folder)
        return diff(options.before, options.after)
    if options.command == "checkpoint":
        from fulgurite.commands.convert_checkpoint import convert_checkpoint

        return convert_checkpoint(options.source, options.target, options.parts)
    from fulgurite.commands.cached import clear, prune, show

    if options.what == "prune":
        return prune(options.compile_dir, options.size, options.days)
    return {"list": show, "clear": clear}[options.what](options.compile_dir)


def _add_compile_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compile-dir", metavar="DIR", help="the cache's folder; default: the user's"
    )


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size as 500M or 2G; got {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def _count(text: str) -> int:
    if re.fullmatch(r"[1-9]\d{0,5}", text) is None:
        raise argparse.ArgumentTypeError(f"expected a number of parts as 4; got {text!r}")
    return int(text)


def _days(text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"expected a number of days; got {text!r}")
    return float(text)


def installed_versions() -> str:
    """Versions of Fulgurite, Python and the packages that count; imports none of them."""
    packages = [f"{name} {_installed(name)}" for name in PACKAGES]
    python = f"python {platform.python_version()}"
    return ", ".join([f"fulgurite {fulgurite.__version__}", python, *packages])


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
