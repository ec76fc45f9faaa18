"""The command ``fulgurite``: run, check and convert parameter files; look into what was built.

Only what a command needs is imported, so that ``--help`` comes at once.

Exit statuses: 0; 1 for what a user can mend, told without a traceback; 2 for a wrong command line;
130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from fulgurite.commands.mistyped import unknown, unknown_command
from fulgurite.commands.options import COMMANDS, add_commands, run_command

if TYPE_CHECKING:
    from fulgurite.backends.csx.diagnostics.user_lines import UserLine
    from fulgurite.config.document.reading import Document
    from fulgurite.config.run.attempt import Attempt
    from fulgurite.config.schema.checking import Phase, Plan

RUNS = {
    "fit": "train what a parameter file describes",
    "validate": "validate the newest checkpoint",
    "validate_all": "validate each checkpoint on each loader",
    "test": "test the newest checkpoint",
    "predict": "predict with the newest checkpoint, for a callback that writes predictions",
}

UNCHECKED = (
    "Not checked, for nothing was imported: your own classes and functions, values that only a"
    " constructor refuses (lr: -1), and whether schedulers set the same number. Without"
    " --no-imports they are."
)
"""The last line of ``check --no-imports``."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="fulgurite",
        description="Any LightningModule as one static program, from a parameter file.",
    )
    top.add_argument("--version", nargs=0, action=_Version, help="print the versions; then stop")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in RUNS.items():
        _add_run_options(commands.add_parser(name, help=does, description=f"{does}.".capitalize()))
    check = commands.add_parser("check", help="say what is wrong with parameter files")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument(
        "--no-imports", action="store_true", help="import nothing; say what a run imports"
    )
    _add_set(check)
    convert = commands.add_parser("convert", help="write an old parameter file in the new form")
    convert.add_argument("file", metavar="OLD.yaml")
    convert.add_argument("-o", "--output", metavar="NEW.yaml", help="default: the screen")
    schema = commands.add_parser("schema", help="print a JSON Schema of parameter files")
    for command in (check, convert, schema):
        _add_debug(command)
    add_commands(commands, _add_debug)
    for command in commands.choices.values():  # an error of a command has its own usage
        command.set_defaults(parser=command)
    return top


class _Version(argparse.Action):
    """Print versions that are looked up only when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fulgurite.commands.options import installed_versions

        print(installed_versions())
        parser.exit()


def _add_run_options(command: argparse.ArgumentParser, only_compiles: bool = False) -> None:
    command.add_argument("file", metavar="PARAMS.yaml")
    _add_set(command)
    command.add_argument("--device", help="CSX, CPU or GPU, in place of the file's")
    command.add_argument("--model_dir", metavar="DIR", help="where logs and checkpoints go")
    command.add_argument(
        "--ckpt_path",
        metavar="FILE",
        help="the checkpoint to begin from, instead of the newest; 'null' for none",
    )
    command.set_defaults(compile_only=only_compiles, validate_only=False)
    if not only_compiles:
        builds = command.add_mutually_exclusive_group()
        builds.add_argument("--compile_only", action="store_true", help="build only; run nothing")
        builds.add_argument("--validate_only", action="store_true", help="trace the programs only")
    command.add_argument(
        "--print_config", action="store_true", help="print the file with everything set; then stop"
    )
    _add_debug(command)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        type=_override,
        metavar="a.b.c=value",
        dest="overrides",
        help="set one key of the file, as trainer.init.loop.max_steps=100",
    )


def _add_debug(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show an error's traceback")


def _override(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not all(key.strip().split(".")):
        raise argparse.ArgumentTypeError(f"expected a.b.c=value; got {text!r}")
    return key.strip(), value


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    return _main(_parsed(sys.argv[1:] if arguments is None else arguments))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """What was typed; ends the process with 2 where it is no command, or has other options."""
    top = parser()
    first = arguments[0] if arguments else "-"
    if not first.startswith("-") and first not in _COMMANDS:
        top.error(unknown_command(first, _COMMANDS))
    return _checked(top, arguments)


def compile_file(file: str, arguments: Sequence[str]) -> int:
    """``fulgurite fit`` of a parameter file that builds its programs; returns its exit status.

    What is wrong with the options is an error of ``fulgurite compile``, which was typed.
    """
    command = argparse.ArgumentParser(prog="fulgurite compile")
    _add_run_options(command, only_compiles=True)
    command.set_defaults(parser=command, command="fit")
    return _main(_checked(command, [file, *arguments]))


def _checked(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options, others = parser.parse_known_args(arguments)
    command = vars(options).pop("parser")
    if others:
        known = command._option_string_actions  # argparse tells nobody which options there are
        command.error(unknown(others, known, is_run=options.command in RUNS))
    return options


def _main(options: argparse.Namespace, attempt: Attempt | None = None) -> int:
    """Run a command; in a process that is watched, ``attempt`` is what it is told."""
    options.attempt = attempt
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # as `python -m` does: a params.yaml lies in its model_dir
    try:
        status = int(_COMMANDS[options.command](options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("fulgurite: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError as error:  # the reader, as `| head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if options.command in RUNS and not options.print_config:
            print(_told(error), file=sys.stderr)
        return 1
    except Exception as error:  # the last stop: told to the user, whatever it is
        if options.debug:
            raise
        print(_told(error), file=sys.stderr)
        return 1


def _told(error: Exception) -> str:
    """An error as its user needs it: text, notes, their own line, and how to see more."""
    from fulgurite.config.document.problems import ParameterFileError

    if isinstance(error, ParameterFileError):
        return str(error)
    line = _line_of(error)
    text = [
        f"{type(error).__name__}: {error}",
        *getattr(error, "__notes__", []),
        *([f"  at {line}"] if line else []),
        "(--debug shows the traceback)",
    ]
    return "\n".join(text)


def _line_of(error: Exception) -> UserLine | None:
    """The user's line of an error whose text has none."""
    try:
        from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
        from fulgurite.backends.csx.diagnostics.user_lines import raised_at
    except ImportError:  # as the error that is told: this torch cannot be used
        return None
    return None if isinstance(error, TraceError) else raised_at(error)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    from fulgurite.config.document.reading import scalar

    return {key: scalar(text) for key, text in options.overrides}


def _run(options: argparse.Namespace) -> int:
    from fulgurite.config.document.reading import with_overrides
    from fulgurite.config.schema.checking import check_document, opened

    document = opened(options.file, _overrides(options))
    document = with_overrides(document, flags_as_overrides(document, options))
    plan = check_document(document)
    # the process that watches this one has said them
    for note in plan.notes if options.attempt is None else ():
        print(plan.document.told(note), file=sys.stderr)
    if options.print_config:
        from fulgurite.config.run.resolved import as_yaml

        print(as_yaml(plan), end="")
        return 0
    return _run_phases(plan, options)


def _run_phases(plan: Plan, options: argparse.Namespace) -> int:
    from lightning_utilities.core.rank_zero import rank_zero_only

    from fulgurite.callbacks.stopping import StopOnSignal
    from fulgurite.config.run.attempt import Attempt
    from fulgurite.config.run.refusing import refuse_unbuilt
    from fulgurite.config.run.restarting import supervise, wants_restarts
    from fulgurite.config.run.running import run_phase

    refuse_unbuilt(plan, options.command)
    attempt: Attempt | None = options.attempt or Attempt.of_this_rank()
    if attempt is None and wants_restarts(plan):
        return supervise(plan, options.command, _attempt, (options,)).status
    # those before it were done by an earlier attempt
    for phase in plan.phases[attempt.trainer if attempt else 0 :]:
        with StopOnSignal() as stop:
            run_phase(plan, phase, options.command, [stop], attempt)
        if stop.signal:
            text = f"\nStopped by {stop.signal.name}."
            if stop.checkpoint:
                text += f"\nGo on with: {_going_on(options, phase, stop.checkpoint)}"
            rank_zero_only(print)(text, file=sys.stderr)
            return stop.exit_status
    return 0


def _attempt(attempt: Attempt, options: argparse.Namespace) -> int:
    """Run a command in a process that is watched; returns its exit status."""
    attempt.begin()
    return _main(options, attempt)


def _going_on(options: argparse.Namespace, phase: Phase, checkpoint: FilePath) -> str:
    """The command that goes on from a checkpoint: the same one, where that is found by itself."""
    from fulgurite.callbacks import LoadCheckpointStates
    from fulgurite.config.run.own_checkpoints import newest_of, steps_of

    command = ["fulgurite", options.command, options.file]
    for key, text in options.overrides:
        command += ["--set", f"{key}={text}"]
    for flag in ("device", "model_dir"):
        if getattr(options, flag):
            command += [f"--{flag}", getattr(options, flag)]
    for call in phase.init.own_callbacks:
        if call.target is LoadCheckpointStates:  # the checkpoint of a stopped run counts whole
            key = ".".join(map(str, call.path))
            command += ["--set", f"{key}={{LoadCheckpointStates: {{}}}}"]
    stage = phase.stages[options.command]
    if "ckpt_path" not in stage and newest_of(phase) == str(checkpoint):
        return shlex.join(command)
    at, loop = ".".join(map(str, phase.path)), phase.init.loop
    command += ["--set", f"{at}.{options.command}.ckpt_path={checkpoint}"]
    if loop is not None and loop.num_steps is not None:
        begun = steps_of(stage.get("ckpt_path"))
        # num_steps counts from the checkpoint that a run begins with
        left = begun + loop.num_steps - steps_of(str(checkpoint))
        command += ["--set", f"{at}.init.loop.num_steps={left}"]
    return shlex.join(command)


def flags_as_overrides(document: Document, options: argparse.Namespace) -> dict[str, Any]:
    """What the flags mean as keys of the file, for each of its trainers.

    To ``fit``, a checkpoint is for the first: the others go on from the one before them.
    """
    from fulgurite.config.schema.checking import trainers

    keys: dict[str, Any] = {}
    for i, (path, value) in enumerate(trainers(document)):
        at, init = ".".join(map(str, path)), value.get("init") if isinstance(value, Mapping) else {}
        init = init if isinstance(init, Mapping) else {}
        keys.update({f"{at}.init.{key}": said for key, said in _place(init, options).items()})
        if options.model_dir:
            keys[f"{at}.init.model_dir"] = options.model_dir
        if options.ckpt_path and (i == 0 or options.command != "fit"):  # the others go on from it
            key = "ckpt_paths" if options.command == "validate_all" else "ckpt_path"
            path_or_none = None if options.ckpt_path == "null" else options.ckpt_path
            keys[f"{at}.{options.command}.{key}"] = path_or_none
    return keys


def _place(init: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of where programs run, as keys of ``init``."""
    flags = [flag for flag in ("compile_only", "validate_only") if getattr(options, flag)]
    backend, device = init.get("backend"), options.device
    if isinstance(backend, Mapping) and device in (None, backend.get("backend_type")):
        return {f"backend.{flag}": True for flag in flags}
    if flags:
        kind = device or init.get("device")
        # the two exclude each other, and the file may have a device
        return {"backend": {"backend_type": kind, **dict.fromkeys(flags, True)}, "device": None}
    if device is None:
        return {}
    # arguments of one backend have no meaning to another
    return {"device": device, **({"backend": None} if backend else {})}


def _check(options: argparse.Namespace) -> int:
    from fulgurite.config.document.problems import ParameterFileError
    from fulgurite.config.schema.checking import check

    status = 0
    for file in options.files:
        try:
            plan = check(file, _overrides(options), imports=not options.no_imports)
        except ParameterFileError as error:
            print(error)
            status = 1
        else:
            for note in plan.notes:
                print(plan.document.told(note))
            for named in plan.imports if options.no_imports else ():
                print(plan.document.told(named))
            print(f"{file}: no problems")
    if options.no_imports:
        print(UNCHECKED)
    return status


def _convert(options: argparse.Namespace) -> int:
    from fulgurite.config.document.reading import read
    from fulgurite.config.legacy.converting import convert, is_legacy
    from fulgurite.config.legacy.yaml_text import to_yaml

    document = read(options.file)
    if not isinstance(document.data, Mapping) or not is_legacy(document.data):
        print(f"{options.file}: is not of the old form: nothing to convert.", file=sys.stderr)
        return 1
    new = convert(document.data)
    document.refuse(new.problems)
    if options.output is None:
        print(to_yaml(new), end="")
    else:
        FilePath(options.output).write_text(to_yaml(new), encoding="utf-8")
    return 0


def _schema(options: argparse.Namespace) -> int:
    import json

    from fulgurite.config.schema.json_schema import schema

    print(json.dumps(schema(), indent=1))
    return 0


_COMMANDS = {
    **dict.fromkeys(RUNS, _run),
    **{"check": _check, "convert": _convert, "schema": _schema},
    **dict.fromkeys(COMMANDS, run_command),
}


if __name__ == "__main__":
    sys.exit(main())
