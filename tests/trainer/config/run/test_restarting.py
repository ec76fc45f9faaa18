"""Runs that crash are started again: which, from where, how often; and what the history says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import crashing
import pytest
import torch
from parts import described

import fulgurite
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.document.variables import Variables
from fulgurite.config.run import restarting
from fulgurite.config.run.attempt import is_of_the_machine
from fulgurite.config.run.restarting import (
    AttemptRecord,
    Outcome,
    RestartsUsedUp,
    RunRecord,
    Summary,
    supervise,
)
from fulgurite.config.schema.checking import check
from fulgurite.errors import NoMeeting, OtherRankEnded


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes find the classes of tests, and wait less."""
    support = Path(__file__).parents[3] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=":")
    monkeypatch.setattr(restarting, "FIRST_WAIT_S", 0.05)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes need no imports: what they do is not what is tested."""
    monkeypatch.setattr(restarting, "START_METHOD", "fork")


FORKED = pytest.mark.usefixtures("forked")


def history(folder: Path) -> dict[str, Any]:
    """The last run of the history."""
    run: dict[str, Any] = json.loads((folder / "summary.json").read_text())["runs"][-1]
    return run


def supervised(target: Any, folder: Path, *arguments: Any, **settings: Any) -> Outcome:
    """Run a function of ``crashing`` as the process that is watched."""
    plan = check(described(folder, autorestart={"max_num_restarts": 2, **settings}))
    return supervise(plan, "fit", target, arguments)


def troubled(folder: Path, what: str | None = None, **init: Any) -> dict[str, Any]:
    """A file whose training has trouble at step 5, once."""
    trouble = {"what": what, "step": 5, "marker": str(folder / "marker")}
    callbacks = [] if what is None else [{"crashing.Trouble": trouble}]
    options: dict[str, Any] = {"model": {"parts.Net": {"dropout": 0.5}}, "checkpoint": {"steps": 2}}
    return described(folder / "out", "CSX", callbacks=callbacks, **options, **init)


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.process
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    restarts = {"max_num_restarts": 1}
    file = troubled(tmp_path, "kill", autorestart=restarts)
    [found] = fulgurite.run_config(file, "fit")
    whole = troubled(tmp_path / "whole")
    assert [found] == fulgurite.run_config(whole, "fit")
    ours, theirs = (
        torch.load(folder / "out" / "checkpoint_8.ckpt", weights_only=True)["state_dict"]
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run = history(tmp_path / "out")
    first, second = run["attempts"]
    assert run["outcome"] == "done"
    assert (first["signal"], first["exit_status"], first["from_step"]) == ("SIGKILL", None, 0)
    assert first["ended_by"].startswith("killed by SIGKILL")
    begun = second["from_step"]
    assert begun in (2, 4)  # the other was being written beside the steps
    assert second["ckpt_path"] == str(tmp_path / "out" / f"checkpoint_{begun}.ckpt")
    assert (second["last_step"], second["exit_status"]) == (8, 0)
    assert [path.name for path in (tmp_path / "out").glob("params*")] == ["params.yaml"]


@pytest.mark.long
@pytest.mark.process
def test_a_trainer_of_a_list_goes_on_and_those_that_are_done_do_not_run_again(
    tmp_path: Path,
) -> None:
    first = troubled(tmp_path / "first", loop={"max_steps": 2})["trainer"]
    restarts = {"max_num_restarts": 1}
    second = troubled(tmp_path, "kill", loop={"num_steps": 6}, autorestart=restarts)["trainer"]
    second["fit"]["ckpt_path"] = str(tmp_path / "first" / "out" / "checkpoint_2.ckpt")
    found = fulgurite.run_config({"trainer": [first, {"trainer": second}]}, "fit")
    assert len(found) == 2
    names = [path.name for path in (tmp_path / "first" / "out").glob("checkpoint*")]
    assert names == ["checkpoint_2.ckpt"]  # and none with a time
    _, again = history(tmp_path / "first" / "out")["attempts"]
    assert again["trainer"] == 1
    assert again["from_step"] in (2, 4)
    assert again["last_step"] == 8  # 6 beyond those of the checkpoint that the file names


@pytest.mark.long
@pytest.mark.process
def test_an_error_of_the_users_code_is_raised_and_not_tried_again(tmp_path: Path) -> None:
    file = troubled(tmp_path, "raise", autorestart={"max_num_restarts": 3})
    with pytest.raises(ValueError, match="an error of the user's code"):
        fulgurite.run_config(file, "fit")
    run = history(tmp_path / "out")
    [attempt] = run["attempts"]
    assert (run["outcome"], attempt["exit_status"]) == ("failed", 1)
    assert attempt["ended_by"] == "ValueError: an error of the user's code"


@pytest.mark.process
@FORKED
def test_restarts_are_used_up_where_no_new_checkpoint_comes(tmp_path: Path) -> None:
    with pytest.raises(
        RestartsUsedUp, match=r"attempt 3 ended after step 3: killed by SIGSEGV"
    ) as e:
        supervised(crashing.dies, tmp_path)
    assert "max_num_restarts is 2, and 3 attempts in a row" in str(e.value)
    assert f"{tmp_path}/summary.json" in str(e.value)
    run = history(tmp_path)
    assert run["outcome"] == "given up"
    assert [one["waited_s"] for one in run["attempts"]] == [0.05, 0.1, None]


@pytest.mark.process
@FORKED
def test_a_restart_goes_on_from_the_newest_whole_checkpoint_of_this_run(tmp_path: Path) -> None:
    folder, seen = tmp_path / "out", tmp_path / "seen"
    folder.mkdir()
    torch.save({"global_step": 9}, folder / "checkpoint_9.ckpt")  # of a run before
    assert supervised(crashing.leaves, folder, str(folder), str(seen)).status == 0
    resumed = ["None", "checkpoint_3.ckpt", "checkpoint_3.ckpt", "checkpoint_5.ckpt"]
    assert seen.read_text().split() == resumed
    assert len(history(folder)["attempts"]) == 4  # of 3, but that new checkpoints count anew


@pytest.mark.long
@pytest.mark.process
def test_a_run_that_hangs_is_killed_and_one_that_builds_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(crashing.hangs, tmp_path, hang_timeout=1).status == 0
    first, second = history(tmp_path)["attempts"]
    assert (first["ended_by"], second["ended_by"]) == ("hung: no batch for 1 s", "done")
    assert "in hangs" in capfd.readouterr().err  # the line where it hung


@pytest.mark.process
@FORKED
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_signal_stopped_is_not_tried_again(number: signal.Signals, tmp_path: Path) -> None:
    outcome = supervised(crashing.stops, tmp_path, int(number))
    assert (outcome.stopped, outcome.status) == (number, 128 + number)
    run = history(tmp_path)
    assert (run["outcome"], len(run["attempts"])) == ("stopped", 1)


@pytest.mark.process
@FORKED
def test_a_crash_when_all_is_done_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    assert supervised(crashing.crashes_at_the_end, tmp_path).status == 0
    assert len(history(tmp_path)["attempts"]) == 1


@pytest.mark.process
@FORKED
def test_an_error_of_the_machine_is_tried_again(tmp_path: Path) -> None:
    outcome = supervised(crashing.loses_a_worker, tmp_path)
    assert (outcome.status, outcome.reason) == (1, "KeyError: 'mine'")
    assert len(history(tmp_path)["attempts"]) == 2


@pytest.mark.process
@FORKED
@pytest.mark.parametrize("status", [0, 7])
def test_a_process_that_was_ended_past_python_is_started_again(status: int, tmp_path: Path) -> None:
    assert supervised(crashing.ends_early, tmp_path, str(tmp_path), status, True).status == 0
    first, second = history(tmp_path)["attempts"]
    expected = f"the process ended with status {status} before the run was done"
    assert first["ended_by"].startswith(expected)
    assert (first["last_step"], first["exit_status"]) == (3, status)
    assert second["ended_by"] == "done"


@pytest.mark.process
@FORKED
@pytest.mark.parametrize("status", [0, 3])
def test_what_the_code_ends_itself_is_not_tried_again(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it done, whatever its status."""
    told: list[str] = []
    monkeypatch.setattr(restarting, "rank_zero_info", told.append)
    outcome = supervised(crashing.ends_early, tmp_path, str(tmp_path), status, False)
    assert (outcome.status, outcome.exited) == (status, True)
    run = history(tmp_path)
    assert (run["outcome"], len(run["attempts"])) == ("stopped", 1)
    expected = f"the code ended it with status {status} (SystemExit). It is not tried again."
    assert told == [f"autorestart: attempt 1 ended after step 3: {expected}"]


@pytest.mark.long
@pytest.mark.process
def test_a_process_that_was_ended_leaves_no_lock_of_progress_bars(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ENDS_EARLY, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "resource_tracker" not in told


_ENDS_EARLY = """
import sys
from pathlib import Path
import crashing
from fulgurite.config.run.restarting import supervise
from fulgurite.config.schema.checking import check
from parts import described
if __name__ == "__main__":
    plan = check(described(Path(sys.argv[1]), autorestart={"max_num_restarts": 2}))
    supervise(plan, "fit", crashing.ends_early, (sys.argv[1], 0, True))
"""


def noted(error: BaseException, note: str) -> BaseException:
    """An error with a note."""
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (ConnectionResetError(), True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), True),
        (RuntimeError("DataLoader timed out after 5 seconds"), True),
        (noted(EOFError(), "Worker 1 of the loader (pid 7) was killed by SIGKILL."), True),
        (RuntimeError("Caught it in DataLoader worker (pid 7)"), False),
        (OtherRankEnded("rank 1 gave no sign of life for 15 s: it was killed"), True),
        (OtherRankEnded("rank 1 ended: ValueError: a hook of the user's"), False),
        (NoMeeting("Gloo cannot connect rank 0 with the others: closed"), True),
        (NoMeeting("Rank 0 cannot open port 29511, where the processes are to meet"), False),
        (FileNotFoundError(2, "No such file"), False),
        (PermissionError(13, "Permission denied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (EOFError(), False),
        (ValueError("x"), False),
    ],
)
def test_errors_of_the_machine_and_of_the_code(error: BaseException, expected: bool) -> None:
    assert is_of_the_machine(error) is expected


def test_the_history_keeps_earlier_runs_and_no_secrets(tmp_path: Path) -> None:
    variables = Variables(values={"TOKEN": ("hunter22", "hunter22")})
    for ended in ("hunter22 was refused", "done"):
        run = RunRecord(file="run.yaml", mode="fit", attempts=[AttemptRecord(number=1)])
        run.attempts[0].ended_by = ended
        Summary(str(tmp_path), run, variables).write()
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    told = [run["attempts"][0]["ended_by"] for run in runs]
    assert told == ["${TOKEN} was refused", "done"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("text", ["[]", "{}", "half of"])
def test_a_file_that_is_no_history_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json is not the history of runs"):
        supervised(crashing.dies, tmp_path)
    assert (tmp_path / "summary.json").read_text() == text


def test_one_of_several_processes_does_not_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of 2 \(WORLD_SIZE\).*torchrun --max-restarts"):
        supervised(crashing.dies, tmp_path)


def test_a_file_that_cannot_be_sent_to_another_process_is_refused(tmp_path: Path) -> None:
    file = described(tmp_path, autorestart={"max_num_restarts": 1})
    arguments = (lambda: None,)
    with pytest.raises(ValueError, match="Write it as text, classes by their import path"):
        restarting.run_watched(check(file), "fit", crashing.dies, arguments)


def test_whoever_runs_a_file_in_his_own_process_is_told_that_nothing_watches(
    tmp_path: Path,
) -> None:
    file = described(tmp_path, autorestart={"max_num_restarts": 1})
    with pytest.raises(ParameterFileError, match="autorestart: fulgurite fit and run_config start"):
        fulgurite.load(file)
    fulgurite.load(file, {"trainer.init.autorestart": None})


@pytest.mark.parametrize("settings", [{}, {"max_num_restarts": 0}, {"max_num_restarts": None}])
def test_without_a_number_of_restarts_nothing_watches(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    assert not restarting.wants_restarts(check(described(tmp_path, autorestart=settings)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_num_restarts": -1}, "max_num_restarts must be 0"),
        ({"hang_timeout": 0}, "hang_timeout must be seconds"),
        ({"min_num_csx": 0}, "min_num_csx must be a positive integer"),
    ],
)
def test_settings_without_a_meaning_are_mistakes(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterFileError, match=text):
        check(described(tmp_path, autorestart=settings))
