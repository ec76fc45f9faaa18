"""``summary.json``: the history of the runs in a folder that are started again after crashes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.checkpoints.files import part
from fulgurite.config.document.variables import Variables

SUMMARY = "summary.json"


def now() -> str:
    """The time, as the history has it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(kw_only=True)
class AttemptRecord:
    """What the history says of one attempt.

    Args:
        number: from 1.
        pid: of its process.
        trainer: of the file, from 0, that ran last.
        ckpt_path: the checkpoint that its training went on from; None where it began anew.
        from_step: the optimizer step at which its training began.
        last_step: the last one that was reported, twice a second, or that a checkpoint of it has.
        exit_status: of the process; None where a signal ended it.
        signal: the name of that.
        ended_by: how it ended, in words.
        waited_s: how long the next one waits.
    """

    number: int
    pid: int | None = None
    began: str = field(default_factory=now)
    ended: str | None = None
    trainer: int = 0
    ckpt_path: str | None = None
    from_step: int | None = None
    last_step: int | None = None
    exit_status: int | None = None
    signal: str | None = None
    ended_by: str | None = None
    waited_s: float | None = None


@dataclass(kw_only=True)
class RunRecord:
    """What the history says of one run: "running", and then "done", "failed", "stopped" (by a
    signal, or the code's own ``sys.exit()``) or "given up" as its outcome.
    """

    file: str
    mode: str
    began: str = field(default_factory=now)
    ended: str | None = None
    outcome: str = "running"
    attempts: list[AttemptRecord] = field(default_factory=list)


class Summary:
    """The file, and in it the run that goes on now, after those that were there.

    Args:
        folder: where it lies.
        run: the record, which the caller changes before ``write``.
        variables: of the parameter file; their values are written as ``${NAME}``.

    Raises:
        ValueError: there is a file of that name, and it is no such history.
    """

    def __init__(self, folder: str, run: RunRecord, variables: Variables) -> None:
        self.path, self.run, self._variables = Path(folder, SUMMARY), run, variables
        self._before = _runs_in(self.path)

    def write(self) -> None:
        """Replace the file in one step. A disk that is full does not end the run."""
        runs = [*self._before, self._variables.hidden_in(asdict(self.run))]
        try:
            with part(self.path.parent) as file:
                file.write((json.dumps({"runs": runs}, indent=1) + "\n").encode())
                os.fsync(file.fileno())
                os.replace(str(file.name), self.path)
        except OSError as error:
            rank_zero_info(f"{self.path} could not be written: {error.strerror}. The run goes on.")


def _runs_in(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        found = None
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, list):
        raise ValueError(
            f"{path} is not the history of runs that autorestart keeps there. Move it, or give"
            " another model_dir."
        )
    return runs
