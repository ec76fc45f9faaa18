"""Keys of parameter files that are ignored here, with a note each that says so.

They speak of one vendor's machines, or of services beside the training. What would change numbers
is never among them: a key that is in no table is an error.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate

from fulgurite.config.document.problems import Path

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

IGNORED_KEYS = {
    f"{_CLUSTER}mgmt_address": _ADDRESS,
    f"{_CLUSTER}mgmt_namespace": _ADDRESS,
    f"{_CLUSTER}credentials_path": _ADDRESS,
    f"{_CLUSTER}workflow_id": _ADDRESS,
    f"{_CLUSTER}max_wgt_servers": _SERVERS,
    f"{_CLUSTER}max_act_per_csx": _SERVERS,
    f"{_CLUSTER}mount_dirs": _MOUNT,
    f"{_CLUSTER}python_paths": _MOUNT,
    f"{_CLUSTER}automount": _MOUNT,
    f"{_CLUSTER}mount_all": _MOUNT,
    f"{_CLUSTER}disable_mount_check": _MOUNT,
    f"{_CLUSTER}job_labels": _QUEUE,
    f"{_CLUSTER}job_priority": _QUEUE,
    f"{_CLUSTER}job_time_sec": f"{_QUEUE}; Trainer's max_time under init ends a run in time",
    f"{_CLUSTER}notifications": _MESSAGES,
    f"{_CLUSTER}cbcore_image": _VERSIONS,
    f"{_CLUSTER}disable_version_check": _VERSIONS,
    f"{_BACKEND}enable_distributed": _PROCESSES,
    f"{_BACKEND}main_process_id": _PROCESSES,
    f"{_BACKEND}dist_backend": _PROCESSES,
    f"{_BACKEND}init_method": _PROCESSES,
    f"{_BACKEND}sync_batchnorm": _PROCESSES,
    f"{_BACKEND}csx.debug.*": (
        "is a flag, which backend has no effect on anywhere; callbacks takes flags, as"
        " - GlobalFlags: {...}"
    ),
    "trainer.init.logging.wsc_log_level": (
        "is the log level of a cluster's servers; there are none here"
    ),
    "trainer.init.logging.enable_act_frequency": (
        "fetches results on logged steps only; here they stay in memory until somebody reads them"
    ),
    "trainer.init.checkpoint.strict_version": (
        "compares versions of a vendor's package; a checkpoint here is Lightning's"
    ),
    f"{_CALLBACKS}DumpAvailableTensorNames": (
        "lists the tensors of a vendor's program; artifact_dir of the backend has the program here"
    ),
    f"{_CALLBACKS}SummaryTensorListener": _TENSORS,
    f"{_CALLBACKS}NormTensorListener": _TENSORS,
    f"{_CALLBACKS}DumpActivations": f"{_TENSORS}; device: CPU lets a debugger look, too",
    f"{_CALLBACKS}ModelZooParamsMetadata": (
        "writes a collection's version into checkpoints; hyperparameters are in them as Lightning"
        " has them"
    ),
    f"{_CALLBACKS}DebugArgsPath": "names debug settings of an appliance; there is none here",
    f"{_CALLBACKS}OpProfiler": "profiles an appliance; profiler: simple under init is Lightning's",
    f"{_CALLBACKS}NaNChecker": "looks for NaN inside an appliance; CheckLoss looks at the loss",
    f"{_CALLBACKS}HFCacheDir": "sets a package's folder; the environment's HF_HOME does",
    f"{_CALLBACKS}LogSparsity": "logs what sparsity does; there is no sparsity here yet",
    f"{_CALLBACKS}ComputeNormGNS": "logs norms per example; ComputeNorm logs those of a batch",
    f"{_CALLBACKS}EmailNotification": _MESSAGES,
    f"{_CALLBACKS}SlackNotification": _MESSAGES,
    f"{_CALLBACKS}EleutherEvalHarness": _HARNESS,
    f"{_CALLBACKS}BigCodeEvalHarness": _HARNESS,
    f"{_LOGGERS}TelemetryLogger": _METRICS_SERVICE,
    f"{_LOGGERS}TensorBoardLogger.legacy_event_dirs": (
        "splits events by train and eval; names of metrics do here"
    ),
}
"""Dotted keys, where ``*`` stands for anything, and what to say of each."""


def note_for(path: Path) -> str | None:
    """What to say of a key that is ignored here; None for all others.

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
    def flags(key: str) -> re.RegexFlag:
        # classes may be written in any case, other keys may not
        return re.IGNORECASE if key.startswith((_CALLBACKS, _LOGGERS)) else re.NOFLAG

    return tuple((re.compile(translate(k), flags(k)), note) for k, note in IGNORED_KEYS.items())
