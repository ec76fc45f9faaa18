"""The keys of old parameter files, and where each one's value goes: a row a key.

*Old* keys stand under ``runconfig``, ``model``, ``optimizer``, ``train_input``, ``eval_input``,
``sparsity`` and ``wandb``; *new* ones under ``trainer``. Keys of these sections that have no row
are arguments: of the model, the optimizer, the loaders, the sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fulgurite.config.document.ignored import note_for
from fulgurite.config.document.problems import Path

SECTIONS = ("runconfig", "model", "optimizer", "train_input", "eval_input", "sparsity", "wandb")

CLOSED_SECTIONS = ("runconfig", "wandb")
"""Sections that have no other keys than those of the table."""


WITHOUT_MEANING = {
    "description": "describes the file; a comment does",
    "tag": "names the file; a comment does",
    "csconfig": "says where a cluster is managed; programs run on this machine",
    "predict_input": "is data to predict from: trainer.predict.predict_dataloader has it",
}
"""Sections without a counterpart."""


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one old key.

    Args:
        old: its dotted key.
        new: dotted keys that get its value; none where it has no counterpart.
        note: what to say where it has none, or means something else.
        harmless: the values that say nothing, where any other would change numbers and is a
            problem; None where none would.
        null: what null means; None is that the key is not given.
    """

    old: str
    new: tuple[str, ...] = ()
    note: str = ""
    harmless: tuple[Any, ...] | None = None
    null: Any = None

    @property
    def old_path(self) -> Path:
        """The old key's path."""
        return tuple(self.old.split("."))

    @property
    def new_paths(self) -> tuple[Path, ...]:
        """The new keys' paths. Callbacks and loggers are named; their place in the list is not."""
        return tuple(("trainer", *_parts(key)) for key in self.new)

    @property
    def without_effect(self) -> str:
        """Why it has no effect here, or nothing."""
        notes = [note_for(path) or "" for path in self.new_paths]
        return self.note if not notes else notes[0] if all(notes) else ""


def _parts(key: str) -> list[str]:
    # what follows the name of a callback is one key, which may have dots: csx.performance.*
    in_list = key.startswith(("init.callbacks.", "init.loggers."))
    return key.split(".", 3 if in_list else -1)


_MEMORY = "limits the memory of an appliance's servers; there are none here"
_COMPILER = "is for another compiler"
_LOGS = "chose what was logged; callbacks and loggers of the new file do"
_EXPERIMENT = "asks for sparse, compressed or low-rank weights, which would change numbers"
_ALL_STAGES = ("fit.ckpt_path", "validate.ckpt_path", "validate_all.ckpt_paths")
_CLUSTER = "init.backend.cluster_config"
_FLAG = "csx.performance.micro_batch_size"

ROWS = (
    Row("runconfig.model_dir", ("init.model_dir",)),
    Row("runconfig.seed", ("init.seed",)),
    Row("runconfig.target_device", ("init.device",)),
    Row("runconfig.mode", note="is the command now: fulgurite fit, validate, validate_all"),
    # the backend
    Row("runconfig.compile_dir", ("init.backend.compile_dir",)),
    Row("runconfig.compile_only", ("init.backend.compile_only",)),
    Row("runconfig.validate_only", ("init.backend.validate_only",)),
    Row("runconfig.retrace_every_iteration", ("init.backend.retrace_every_iteration",)),
    Row("runconfig.autogen_policy", ("init.backend.autogen_policy",)),
    Row("runconfig.num_csx", (f"{_CLUSTER}.num_csx",)),
    Row("runconfig.num_wgt_servers", (f"{_CLUSTER}.max_wgt_servers",)),
    Row("runconfig.num_act_servers", (f"{_CLUSTER}.max_act_per_csx",)),
    Row("runconfig.num_workers_per_csx", (f"{_CLUSTER}.num_workers_per_csx",)),
    Row("runconfig.mgmt_address", (f"{_CLUSTER}.mgmt_address",)),
    Row("runconfig.mgmt_namespace", (f"{_CLUSTER}.mgmt_namespace",)),
    Row("runconfig.credentials_path", (f"{_CLUSTER}.credentials_path",)),
    Row("runconfig.mount_dirs", (f"{_CLUSTER}.mount_dirs",)),
    Row("runconfig.python_paths", (f"{_CLUSTER}.python_paths",)),
    Row("runconfig.cbcore_image", (f"{_CLUSTER}.cbcore_image",)),
    Row("runconfig.job_labels", (f"{_CLUSTER}.job_labels",)),
    Row("runconfig.job_priority", (f"{_CLUSTER}.job_priority",)),
    Row("runconfig.job_time_sec", (f"{_CLUSTER}.job_time_sec",)),
    Row("runconfig.disable_version_check", (f"{_CLUSTER}.disable_version_check",)),
    Row(
        "runconfig.enable_distributed",
        note="trains in several eager processes: give Lightning's strategy and devices under init",
        harmless=(False,),
    ),
    Row("runconfig.main_process_id", ("init.backend.main_process_id",)),
    Row("runconfig.dist_addr", note="is for several eager processes"),
    Row("runconfig.dist_backend", ("init.backend.dist_backend",)),
    Row("runconfig.init_method", ("init.backend.init_method",)),
    Row("runconfig.sync_batchnorm", ("init.backend.sync_batchnorm",)),
    # how long, how often
    Row("runconfig.num_steps", ("init.loop.num_steps",)),
    Row("runconfig.max_steps", ("init.loop.max_steps",)),
    Row("runconfig.num_epochs", ("init.loop.num_epochs",)),
    Row("runconfig.steps_per_epoch", ("init.loop.steps_per_epoch",)),
    Row("runconfig.eval_frequency", ("init.loop.eval_frequency",)),
    Row("runconfig.eval_steps", ("init.loop.eval_steps",)),
    Row("optimizer.grad_accum_steps", ("init.loop.grad_accum_steps",)),
    # checkpoints
    Row("runconfig.checkpoint_path", _ALL_STAGES),
    Row("runconfig.checkpoint_steps", ("init.checkpoint.steps",)),
    Row(
        "runconfig.disable_strict_checkpoint_loading",
        ("init.checkpoint.disable_strict_checkpoint_loading",),
    ),
    Row(
        "runconfig.autoload_last_checkpoint",
        ("init.checkpoint.autoload_last_checkpoint",),
        null=False,
    ),
    Row("runconfig.save_initial_checkpoint", ("init.checkpoint.save_initial_checkpoint",)),
    Row("runconfig.max_checkpoints", ("init.callbacks.KeepNCheckpoints.n",)),
    Row(
        "runconfig.load_checkpoint_states",
        ("init.callbacks.LoadCheckpointStates.load_checkpoint_states",),
    ),
    # what is logged
    Row("runconfig.log_steps", ("init.logging.log_steps",)),
    Row("runconfig.logging", ("init.logging.log_level",)),
    Row("runconfig.wsc_log_level", ("init.logging.wsc_log_level",)),
    Row("runconfig.enable_act_frequency", ("init.logging.enable_act_frequency",)),
    Row("runconfig.log_input_summaries", ("init.callbacks.LogInputSummaries",)),
    Row("runconfig.check_loss_values", ("init.callbacks.CheckLoss",)),
    Row("optimizer.log_summaries", ("init.precision.log_loss_scale", "init.callbacks.ComputeNorm")),
    Row("runconfig.summary_dir", ("init.loggers.TensorBoardLogger.save_dir",)),
    Row("runconfig.legacy_event_dirs", ("init.loggers.TensorBoardLogger.legacy_event_dirs",)),
    Row("wandb.project", ("init.loggers.WandbLogger.project",)),
    Row("wandb.group", ("init.loggers.WandbLogger.group",)),
    Row("wandb.run_id", ("init.loggers.WandbLogger.id",)),
    Row("wandb.run_name", ("init.loggers.WandbLogger.name",)),
    Row("wandb.job_type", ("init.loggers.WandbLogger.job_type",)),
    Row("wandb.tags", ("init.loggers.WandbLogger.tags",)),
    Row("wandb.resume", ("init.loggers.WandbLogger.resume",)),
    Row("wandb.entity", ("init.loggers.WandbLogger.entity",)),
    # precision
    Row("model.mixed_precision", ("init.precision.enabled",)),
    Row("model.fp16_type", ("init.precision.fp16_type",)),
    Row("runconfig.precision_opt_level", ("init.precision.precision_opt_level",)),
    Row("optimizer.loss_scaling_factor", ("init.precision.loss_scaling_factor",)),
    Row("optimizer.initial_loss_scale", ("init.precision.initial_loss_scale",)),
    Row("optimizer.steps_per_increase", ("init.precision.steps_per_increase",)),
    Row("optimizer.min_loss_scale", ("init.precision.min_loss_scale",)),
    Row("optimizer.max_loss_scale", ("init.precision.max_loss_scale",)),
    Row("optimizer.max_gradient_norm", ("init.precision.max_gradient_norm",)),
    Row("optimizer.max_gradient_value", ("init.precision.max_gradient_value",)),
    # weights and batches
    Row("model.selective_grad", ("init.callbacks.SelectiveGrad.selective_grads",)),
    Row("model.lora_params", note=_EXPERIMENT, harmless=({}, [])),
    Row("model.compression", note=_EXPERIMENT, harmless=({}, [])),
    Row("sparsity.add_summaries", ("init.callbacks.LogSparsity",)),
    Row("train_input.micro_batch_size", (f"init.callbacks.ScopedTrainFlags.{_FLAG}",)),
    Row("eval_input.micro_batch_size", (f"init.callbacks.ScopedValidateFlags.{_FLAG}",)),
    # one vendor's machines
    Row(
        "runconfig.transfer_processes",
        note="sizes an appliance's input; num_workers of a loader does here",
    ),
    Row("runconfig.ini", note=_COMPILER),
    Row("runconfig.debug_args", note=_COMPILER),
    Row("runconfig.debug_args_path", ("init.callbacks.DebugArgsPath",)),
    Row(
        "runconfig.lazy_initialization",
        note="chose when weights are made, which are the same either way",
    ),
    Row("runconfig.log_initialization", note=_LOGS),
    Row(
        "runconfig.drop_data",
        note="runs without data: time a run by fulgurite fit --set trainer.init.loop.max_steps=100",
        harmless=(False,),
    ),
    Row("runconfig.fabric_type_blacklist", note="chooses among machines of a cluster"),
    Row("runconfig.compile_crd_memory_gi", note=_MEMORY),
    Row("runconfig.execute_crd_memory_gi", note=_MEMORY),
    Row("runconfig.wrk_memory_gi", note=_MEMORY),
    Row("runconfig.act_memory_gi", note=_MEMORY),
    Row("runconfig.cmd_memory_gi", note=_MEMORY),
    Row("runconfig.wgt_memory_gi", note=_MEMORY),
    Row("runconfig.chf_memory_gi", note=_MEMORY),
    Row("runconfig.experimental.listeners", ("init.callbacks.SummaryTensorListener",)),
    Row("runconfig.op_profiler_config", ("init.callbacks.OpProfiler",)),
    Row("runconfig.dump_activations", ("init.callbacks.DumpActivations",)),
    Row("runconfig.hf_cache_dir", ("init.callbacks.HFCacheDir",)),
    Row("runconfig.variant", note="named a variant of the model; its arguments say all"),
    # the first generation of files
    Row("runconfig.use_cs_grad_accum", note="let a batch be split; micro_batch_size says how"),
    Row("runconfig.keep_checkpoint_max", note="was read by TensorFlow alone"),
    Row("runconfig.save_checkpoint_steps", note="was read by TensorFlow alone"),
    Row("runconfig.save_summary_steps", note="was read by TensorFlow alone"),
    Row("runconfig.log_step_count_steps", note="was read by TensorFlow alone"),
    Row("runconfig.save_losses", note=_LOGS),
    Row("runconfig.show_debug_metrics", note=_LOGS),
    Row("runconfig.use_appliance_data", note="is for an appliance"),
    Row(
        "runconfig.multireplica",
        note="ran several replicas with a batch each, which is not built here",
        harmless=(False,),
    ),
    Row("runconfig.use_cstorch_optimizer_step", note="chose between two ways to the same numbers"),
    Row("model.use_bfloat16", ("init.precision.fp16_type",)),
    Row("model.precision_opt_level", ("init.precision.precision_opt_level",)),
    Row("optimizer.ws_summary", note=_LOGS),
    Row("optimizer.use_bias_correction", note="was read by TensorFlow alone"),
    Row(
        "optimizer.epsilon",
        note="was read by TensorFlow alone: eps is what counts, and its default",
    ),
)

BY_FUNCTION = (
    Row("optimizer.optimizer_type", ("init.optimizer",), note="It is the name of the class."),
    Row(
        "optimizer.learning_rate",
        ("init.optimizer", "init.schedulers"),
        note="A number is the optimizer's `lr`. Schedules are schedulers, a list of them is"
        " `SequentialLR`, or `ChainedScheduler` where `main_scheduler: chained` says so.",
    ),
    Row(
        "optimizer.disable_lr_steps_reset",
        note="counts every schedule of a list from the first step of all",
        harmless=(False,),
    ),
    Row(
        "optimizer",
        ("init.optimizer",),
        note="What else it says is the optimizer's. `beta1` and `beta2` are `betas`,"
        " `weight_decay_rate` is `weight_decay`, `use_nesterov` is `nesterov`.",
    ),
    Row("model", ("init.model",), note="What else it says is the model's."),
    Row("sparsity", ("init.sparsity",)),
    Row("train_input", ("fit.train_dataloader",)),
    Row(
        "eval_input",
        ("fit.val_dataloader", "validate.val_dataloader", "validate_all.val_dataloaders"),
    ),
)
"""What takes more than a new name: ``converting`` and ``old_optimizers`` have functions for it."""
