"""Keys that files have and that mean nothing here, with a note each.

They speak of one vendor's machines, or of services beside the training. What would change numbers
is never among them: a key that is in no table is an error.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fnmatch import translate

from fulgurite.config.document.problems import Path


@dataclass(frozen=True, slots=True)
class Known:
    """A key without a meaning here.

    Args:
        where: its dotted key; ``*`` stands for anything.
        note: what to say of it.
    """

    where: str
    note: str


_ADDRESS = "says where a cluster is managed; programs run on this machine"
_SERVERS = "sizes the servers of an appliance; there are none here"
_MOUNT = "says what the workers of a cluster see; here they see this machine's files"
_QUEUE = "is for a cluster's queue; nothing is queued here"
_VERSIONS = "is about versions of a cluster's software; there is none here"
_PROCESSES = "is for several eager processes; Lightning's strategy and devices under init set those"
_METRICS_SERVICE = "sends figures to a service; the loggers get the same ones"
_MESSAGES = "sends messages; a callback of your own can, by its class path"
_HARNESS = "runs another package's evaluation; run that on a checkpoint"
_TENSORS = "looks into a vendor's program; an entry of self.log does the same here"

_CLUSTER = "trainer.init.backend.cluster_config."
_BACKEND = "trainer.init.backend."
_CALLBACKS = "trainer.init.callbacks."
_LOGGERS = "trainer.init.loggers."
_CLASSES = (_CALLBACKS, _LOGGERS)

KNOWN = (
    Known(f"{_CLUSTER}mgmt_address", _ADDRESS),
    Known(f"{_CLUSTER}mgmt_namespace", _ADDRESS),
    Known(f"{_CLUSTER}credentials_path", _ADDRESS),
    Known(f"{_CLUSTER}workflow_id", _ADDRESS),
    Known(f"{_CLUSTER}max_wgt_servers", _SERVERS),
    Known(f"{_CLUSTER}max_act_per_csx", _SERVERS),
    Known(
        f"{_CLUSTER}num_workers_per_csx",
        "counts input workers of an appliance; num_workers of a loader does here",
    ),
    Known(f"{_CLUSTER}mount_dirs", _MOUNT),
    Known(f"{_CLUSTER}python_paths", _MOUNT),
    Known(f"{_CLUSTER}automount", _MOUNT),
    Known(f"{_CLUSTER}mount_all", _MOUNT),
    Known(f"{_CLUSTER}disable_mount_check", _MOUNT),
    Known(f"{_CLUSTER}job_labels", _QUEUE),
    Known(f"{_CLUSTER}job_priority", _QUEUE),
    Known(f"{_CLUSTER}job_time_sec", f"{_QUEUE}; Trainer's max_time under init ends a run in time"),
    Known(f"{_CLUSTER}notifications", _MESSAGES),
    Known(f"{_CLUSTER}cbcore_image", _VERSIONS),
    Known(f"{_CLUSTER}disable_version_check", _VERSIONS),
    Known(f"{_BACKEND}enable_distributed", _PROCESSES),
    Known(f"{_BACKEND}main_process_id", _PROCESSES),
    Known(f"{_BACKEND}dist_backend", _PROCESSES),
    Known(f"{_BACKEND}init_method", _PROCESSES),
    Known(f"{_BACKEND}sync_batchnorm", _PROCESSES),
    Known(
        f"{_BACKEND}csx.debug.*",
        "is a flag, which backend has no effect on anywhere; callbacks takes flags, as"
        " - GlobalFlags: {...}",
    ),
    Known(
        "trainer.init.logging.wsc_log_level",
        "is the log level of a cluster's servers; there are none here",
    ),
    Known(
        "trainer.init.logging.enable_act_frequency",
        "fetches results on logged steps only; here they stay in memory until somebody reads them",
    ),
    Known(
        "trainer.init.checkpoint.strict_version",
        "compares versions of a vendor's package; a checkpoint here is Lightning's",
    ),
    Known(
        f"{_CALLBACKS}DumpAvailableTensorNames",
        "lists the tensors of a vendor's program; artifact_dir of the backend has the program here",
    ),
    Known(f"{_CALLBACKS}SummaryTensorListener", _TENSORS),
    Known(f"{_CALLBACKS}NormTensorListener", _TENSORS),
    Known(f"{_CALLBACKS}DumpActivations", f"{_TENSORS}; device: CPU lets a debugger look, too"),
    Known(
        f"{_CALLBACKS}ModelZooParamsMetadata",
        "writes a collection's version into checkpoints; hyperparameters are in them as Lightning"
        " has them",
    ),
    Known(f"{_CALLBACKS}DebugArgsPath", "names debug settings of an appliance; there is none here"),
    Known(
        f"{_CALLBACKS}OpProfiler",
        "profiles an appliance; profiler: simple under init is Lightning's",
    ),
    Known(
        f"{_CALLBACKS}NaNChecker", "looks for NaN inside an appliance; CheckLoss looks at the loss"
    ),
    Known(f"{_CALLBACKS}HFCacheDir", "sets a package's folder; the environment's HF_HOME does"),
    Known(f"{_CALLBACKS}LogSparsity", "logs what sparsity does; there is no sparsity here yet"),
    Known(
        f"{_CALLBACKS}ComputeNormGNS", "logs norms per example; ComputeNorm logs those of a batch"
    ),
    Known(f"{_CALLBACKS}EmailNotification", _MESSAGES),
    Known(f"{_CALLBACKS}SlackNotification", _MESSAGES),
    Known(f"{_CALLBACKS}EleutherEvalHarness", _HARNESS),
    Known(f"{_CALLBACKS}BigCodeEvalHarness", _HARNESS),
    Known(f"{_LOGGERS}TelemetryLogger", _METRICS_SERVICE),
    Known(
        f"{_LOGGERS}TensorBoardLogger.legacy_event_dirs",
        "splits events by train and eval; names of metrics do here",
    ),
)


def note_for(path: Path) -> str | None:
    """What to say of a key without a meaning here; None for all others.

    Args:
        path: where it stands. Which trainer of several, and which item of a list, is the same.
    """
    parts = [part for part in path if not isinstance(part, int)]
    if parts[:2] == ["trainer", "trainer"]:
        del parts[0]
    key = ".".join(parts)
    for pattern, note in _patterns():
        if pattern.match(key):
            return note
    return None


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    def flags(where: str) -> re.RegexFlag:
        # classes may be written in any case, other keys may not
        return re.IGNORECASE if where.startswith(_CLASSES) else re.NOFLAG

    return tuple((re.compile(translate(k.where), flags(k.where)), k.note) for k in KNOWN)
