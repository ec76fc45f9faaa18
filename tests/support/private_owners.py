"""Whose the private names are that the code reads of objects, where ``x._name`` does not say it.

For ``tests/tools/document_private_names.py``, which asks for a row here where it finds another.
"""

from __future__ import annotations

_L = "lightning.pytorch"
_CONNECTOR = f"{_L}.trainer.connectors"
_TRAINER, _MODULE = f"{_L}.Trainer", f"{_L}.LightningModule"
_EPOCH = f"{_L}.loops.training_epoch_loop._TrainingEpochLoop"
_FIT = f"{_L}.loops.fit_loop._FitLoop"
_EVALUATION = f"{_L}.loops.evaluation_loop._EvaluationLoop"
_PREDICTION = f"{_L}.loops.prediction_loop._PredictionLoop"
_AUTOMATIC = f"{_L}.loops.optimization.automatic._AutomaticOptimization"
_COMBINED = f"{_L}.utilities.combined_loader.CombinedLoader"
_LOGGERS = f"{_CONNECTOR}.logger_connector.logger_connector._LoggerConnector"
_RESULTS = f"{_CONNECTOR}.logger_connector.result"
_ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
_WORKERS = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_NN, _OPTIMIZER = "torch.nn.Module", "torch.optim.Optimizer"
_ATEN = "torch.ops.aten"
_OVERLOAD, _METRIC = "torch._ops.OpOverload", "torchmetrics.Metric"

OWNERS: dict[str, tuple[str, ...]] = {
    "_skip_backward": (_AUTOMATIC,),
    "_C": ("torch",),
    "_get_layout": ("torch.serialization",),
    "_VariableFunctions": ("torch._C",),
    "_accelerator_connector": (_TRAINER,),
    "_accelerator_flag": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_active_loop": (_TRAINER,),
    "_backward_hooks": (_NN, "torch.Tensor"),
    "_backward_pre_hooks": (_NN,),
    "_batch_sampler": (f"{_L}.overrides.distributed._IndexBatchSamplerWrapper",),
    "_batches_that_stepped": (_EPOCH,),
    "_buffers": (_NN,),
    "_c10d_functional": ("torch.ops",),
    "_call_children_scripts": (f"{_L}.strategies.launchers._SubprocessScriptLauncher",),
    "_callback_metrics": (_LOGGERS,),
    "_check_input_dim": ("torch.nn.modules.batchnorm._NormBase",),
    "_check_non_zero_input_channels": ("torch.nn.SyncBatchNorm",),
    "_cdata": ("torch.UntypedStorage",),
    "_checkpoint_io": (f"{_L}.strategies.Strategy",),
    "_combined_loader": (_FIT, _EVALUATION),
    "_combined_loader_states_to_load": (_FIT,),
    "_compiled_call_impl": (_NN,),
    "_compiler_ctx": (_MODULE,),
    "_computed": (_METRIC,),
    "_consumed": (f"{_L}.utilities.combined_loader._MaxSizeCycle",),
    "_current_fx": (_LOGGERS,),
    "_current_fx_name": (_MODULE,),
    "_data_fetcher": (_FIT, _EVALUATION),
    "_dataset_kind": (_ITERATOR,),
    "_defaults": (_METRIC,),
    "_devices_flag": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_detect_anomaly": (_TRAINER,),
    "_early_exit": (f"{_L}.callbacks.LearningRateFinder",),
    "_enable_compute_groups": ("torchmetrics.MetricCollection",),
    "_evaluation_loop": (_TRAINER,),
    "_extract_batch_size": (f"{_RESULTS}._ResultCollection",),
    "_fabric": (_MODULE,),
    "_first_loop_iter": (_LOGGERS,),
    "_flat_weight_refs": ("torch.nn.RNNBase",),
    "_flat_weights": ("torch.nn.RNNBase",),
    "_forward_cache": (_METRIC,),
    "_forward_hooks": (_NN,),
    "_forward_pre_hooks": (_NN,),
    "_get_capturable_supported_devices": ("torch.optim.asgd", "torch.optim.radam"),
    "_get_process_group_backend": (f"{_L}.strategies.DDPStrategy",),
    "_get_value": ("torch.optim.optimizer",),
    "_groups_checked": ("torchmetrics.MetricCollection",),
    "_hparams": (_MODULE,),
    "_hparams_initial": (_MODULE,),
    "_init_group": tuple(f"torch.optim.{name}" for name in ("SGD", "Adam", "Muon")),
    "_is_sequential": (_EVALUATION,),
    "_is_training_done": (_EPOCH,),
    "_iterator": (_COMBINED,),
    "_last_checkpoint_saved": (f"{_L}.callbacks.ModelCheckpoint",),
    "_last_lr": ("torch.optim.lr_scheduler.LRScheduler",),
    "_log_softmax": (_ATEN,),
    "_layer_sync": (f"{_L}.strategies.ParallelStrategy",),
    "_lightning_optimizers": (f"{_L}.strategies.Strategy",),
    "_link_checkpoint": (f"{_L}.callbacks.ModelCheckpoint",),
    "_load_state_dicts": (_COMBINED,),
    "_loaded_from_state_dict": (f"{_L}.loops.loop._Loop",),
    "_logged_metrics": (_LOGGERS,),
    "_logger_connector": (_TRAINER,),
    "_make_backward_fn": (_AUTOMATIC,),
    "_make_zero_grad_fn": (_AUTOMATIC,),
    "_modules": (_NN,),
    "_next_data": (_ITERATOR,),
    "_next_index": (_ITERATOR,),
    "_num_nodes_flag": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_num_ready_batches_reached": (_EPOCH,),
    "_num_workers": (_ITERATOR,),
    "_num_yielded": (_ITERATOR,),
    "_on_before_batch_transfer": (_MODULE,),
    "_on_evaluation_model_train": (_EVALUATION,),
    "_on_predict_model_train": (_PREDICTION,),
    "_opt_called": ("torch.optim.lr_scheduler.LRScheduler",),
    "_optimizer_step": (_AUTOMATIC,),
    "_optimizer_step_post_hooks": (_OPTIMIZER,),
    "_optimizer_step_pre_hooks": (_OPTIMIZER,),
    "_optimizers": (f"{_L}.strategies.Strategy",),
    "_overloadpacket": (_OVERLOAD,),
    "_parallel_devices": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_parameters": (_NN,),
    "_post_accumulate_grad_hooks": ("torch.Tensor",),
    "_pre_fusion_custom_pass": ("torch._inductor.config",),
    "_precision_flag": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_prefetch_factor": (_WORKERS,),
    "_progress_bar_metrics": (_LOGGERS,),
    "_rcvd_idx": (_WORKERS,),
    "_reductions": (_METRIC,),
    "_results": (_TRAINER, _EPOCH, _EVALUATION),
    "_sampler_iter": (_ITERATOR,),
    "_save_checkpoint": (f"{_L}.callbacks.ModelCheckpoint",),
    "_schema": (_OVERLOAD,),
    "_seen_batches_per_dataloader": (_EVALUATION,),
    "_send_idx": (_WORKERS,),
    "_sequence_nr": ("torch.autograd.graph.Node",),
    "_should": (f"{_RESULTS}._Sync",),
    "_should_accumulate": (_EPOCH,),
    "_signal_connector": (_TRAINER,),
    "_sigterm_notifier_fn": (f"{_CONNECTOR}.signal_connector._SignalConnector",),
    "_slurm_sigusr_handler_fn": (f"{_CONNECTOR}.signal_connector._SignalConnector",),
    "_single_tensor_asgd": ("torch.optim.asgd",),
    "_single_tensor_radam": ("torch.optim.radam",),
    "_softmax": (_ATEN,),
    "_spec": (_COMBINED,),
    "_stage": (_EVALUATION,),
    "_start_method": (f"{_L}.strategies.DDPStrategy",),
    "_strategy_flag": (f"{_CONNECTOR}.accelerator_connector._AcceleratorConnector",),
    "_task_info": (_WORKERS,),
    "_timeout": (f"{_L}.strategies.DDPStrategy",),
    "_to_copy": (_ATEN,),
    "_reset_parameters": ("torch.nn.MultiheadAttention", "torch.nn.Transformer"),
    "_tensor_name": ("torch.nn.utils.prune.BasePruningMethod",),
    "_trainer": (_MODULE,),
    "_training_step": (_AUTOMATIC,),
    "_unsafe_index": (_ATEN,),
    "_unsafe_view": (_ATEN,),
    "_untyped_storage": ("torch.TypedStorage",),
    "_update_count": (_METRIC,),
    "_version": ("torch.Tensor",),
    "_warning_cache": (_EPOCH,),
    "_workers": (_WORKERS,),
}
"""Who has a private attribute that the code reads of an object, or names in a string."""

OTHERS = {
    *("_exit", "_getframe", "_is_owned", "_replace", "_make", "_fields", "_is_protocol"),  # Python
    *("_inst", "_actions", "_option_string_actions"),  # of random, of argparse
    "_rand",  # of numpy
    "_wandb_hook_names",  # of wandb, where it is in use
    "_post_device_transfer",  # of a runner's model
    *("_growth_tracker", "_schedulers"),  # keys in checkpoints
    *("_configure_optimizer", "_configure_lr_scheduler"),  # of old models
    *(
        "_metric",
        "_why",
        "_undefined",
        "_losses_until_bad",
        "_evaluation",
    ),  # our own, of other files
    *("_is_avx512_bf16_supported", "_is_amx_fp16_supported"),  # removed where they are
    *("_low_memory_max_pool_with_offsets", "_pytest"),  # told apart in strings where they are
}
"""Private names of what no version is asked of."""


ENDS_AT = (
    *("torch._inductor.virtualized.V", "torch._inductor.virtualized.ops"),
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
)
"""Objects whose attributes are those of what the compiler puts there at the time, or Python's."""

ENDS = {
    *("_step", "_end", "_batch_start", "_batch_end", "_epoch_end", "_backward", "_bytes"),
    *("_passes", "_dir", "_orig", "_ns", "_scaled_dot_product"),
}
"""With what names end that are put together, or begin."""

PYTHONS = {"math", "sys", "warnings", "logging", "logging.Logger", "log"}
PYTHONS_HERE = {("backends/csx/contract/frozen_reads.py", "home")}
"""Owners of patches that are Python's own, or numpy's; anywhere, and in a file."""

_CSX = "backends/csx"
_STRATEGY = f"{_L}.strategies.Strategy"
_RATES = "torch.optim.lr_scheduler.LRScheduler"

STANDS_FOR: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{_CSX}/capture/metrics.py", "functions"): (
        "torchmetrics.utilities.compute.normalize_logits_if_needed",
        "torchmetrics.functional.classification.hinge"
        "._multiclass_hinge_loss_tensor_validation",  # and its kin
    ),
    (f"{_CSX}/capture/host_calls.py", "kind"): (f"{_RATES}.step",),
    (f"{_CSX}/capture/metrics.py", "module"): (
        f"{_METRIC}.full_state_update",
        "torchmetrics.MetricCollection._enable_compute_groups",
    ),
    (f"{_CSX}/capture/host_calls.py", "scheduler"): (f"{_RATES}.step",),
    (f"{_CSX}/capture/metrics.py", "metric"): tuple(
        f"{_METRIC}.{name}" for name in ("compute", "reset", "update")
    ),
    (f"{_CSX}/capture/lightning_scope.py", "Trainer"): tuple(
        f"{_TRAINER}.{name}"
        for name in (
            *("sanity_checking", "training", "validating", "testing", "predicting"),
            "evaluating",
        )
    ),
    (f"{_CSX}/capture/lightning_scope.py", "TrainerState"): tuple(
        f"{_L}.trainer.states.TrainerState.{name}" for name in ("stage", "fn")
    ),
    (f"{_CSX}/compile/inductor/toolchain.py", "vector_units.VecISA"): (
        "torch._inductor.cpu_vec_isa.VecISA.check_build",
    ),
    (f"{_CSX}/contract/attributes.py", "nn.Module"): tuple(
        f"{_NN}.{name}"
        for name in (
            *("__setattr__", "__delattr__", "register_parameter", "register_buffer"),
            "add_module",
        )
    ),
    (f"{_CSX}/contract/frozen_reads.py", "module"): tuple(
        f"{_MODULE}.{name}" for name in ("optimizer_step", "optimizer_zero_grad")
    ),
    (f"{_CSX}/contract/frozen_reads.py", "owner"): tuple(
        f"{owner}.{name}"
        for owner in (_MODULE, _TRAINER)
        for name in ("global_step", "current_epoch", "logger", "loggers")
    )
    + tuple(
        f"{_TRAINER}.{name}"
        for name in ("is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics")
    ),
    (f"{_CSX}/contract/refusals.py", "torch.nested"): tuple(
        f"torch.nested.{name}"
        for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")
    ),
    (f"{_CSX}/contract/refusals.py", "dist"): tuple(
        f"torch.distributed.{name}"
        for name in (
            *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
            *("gather", "reduce_scatter", "send", "recv", "barrier", "all_gather_object"),
            "broadcast_object_list",
        )
    ),
    (f"{_CSX}/contract/refusals.py", "home"): tuple(
        f"{owner}.{name}"
        for owner in ("torch", "torch.random")
        for name in ("manual_seed", "seed", "set_rng_state")
    ),
    (f"{_CSX}/hyperparams/torch_optim.py", "module"): (
        "torch.optim.asgd._get_capturable_supported_devices",
        "torch.optim.asgd._single_tensor_asgd",
        "torch.optim.optimizer._get_value",
        "torch.optim.radam._get_capturable_supported_devices",
        "torch.optim.radam._single_tensor_radam",
    ),
    (f"{_CSX}/hyperparams/torch_optim.py", "owner"): tuple(
        f"torch.optim.{name}._single_tensor_{name}"
        for name in ("adadelta", "adagrad", "adam", "adamax", "nadam", "rmsprop", "sgd")
    ),
    (f"{_CSX}/program/audit.py", "profiler"): (f"{_TRAINER}.profiler",),
    ("backends/safe_load.py", "strategy"): (f"{_STRATEGY}.load_checkpoint",),
    ("callbacks/saving.py", "trainer.fit_loop"): (f"{_FIT}.on_run_end",),
    ("callbacks/saving.py", "_changes(callback, files)"): tuple(
        f"{_L}.callbacks.ModelCheckpoint.{name}"
        for name in ("_save_checkpoint", "_link_checkpoint", "file_exists")
    ),
    ("callbacks/monitors.py", "trainer.strategy"): (f"{_STRATEGY}.training_step",),
    ("callbacks/checkpoint_states.py", "strategy"): (f"{_STRATEGY}.load_checkpoint",),
    ("callbacks/runner_hooks.py", "[change]"): (
        f"{_MODULE}.on_before_batch_transfer",
        f"{_L}.LightningDataModule.on_before_batch_transfer",
    ),
    ("loops/loader_errors.py", "kind"): (f"{_ITERATOR}._next_index",),
    ("loops/optimization.py", "module"): (f"{_MODULE}.manual_backward",),
    ("trainer/config/run/running.py", "one"): (f"{_L}.loggers.Logger.log_metrics",),
    ("trainer/config/run/running.py", "[told(name) for name in loads]"): tuple(
        f"{_STRATEGY}.{name}"
        for name in ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
    ),
    ("trainer/trainer.py", "changes"): (
        *(f"{_STRATEGY}.{name}" for name in ("training_step", "load_checkpoint")),
        *(f"{_STRATEGY}.setup_optimizers", f"{_L}.plugins.Precision.clip_grad_by_norm"),
    ),
}
"""What is replaced where a patch's owner or names are not in the code as such, by file and code."""
