"""What is private in other packages, or replaced there, and needed here.

Made from the code by tests/tools/document_private_names.py, which also writes what happens where
one is gone: docs/private_names.md.
"""

REQUIRED: dict[str, dict[str, str]] = {
    "lightning.fabric.connector": {
        "_convert_precision_to_unified_args": "trainer/precision_arguments.py",
    },
    "lightning.fabric.loggers.tensorboard": {
        "_TENSORBOARDX_AVAILABLE": "trainer/trainer.py",
        "_TENSORBOARD_AVAILABLE": "trainer/trainer.py",
    },
    "lightning.fabric.plugins.precision.precision": {
        "_PRECISION_INPUT": "trainer/trainer.py",
    },
    "lightning.fabric.utilities.distributed": {
        "_init_dist_connection": "backends/csx/plugins/parallel.py",
        "_set_num_threads_if_needed": "backends/csx/plugins/launcher.py",
    },
    "lightning.fabric.utilities.imports": {
        "_IS_INTERACTIVE": "backends/csx/plugins/parallel.py",
    },
    "lightning.fabric.utilities.types": {
        "_Stateful": "loops/position.py",
    },
    "lightning.pytorch.LightningDataModule": {
        "on_before_batch_transfer": "callbacks/runner_hooks.py",
    },
    "lightning.pytorch.LightningModule": {
        "_compiler_ctx": "backends/csx/plugins/refusals.py",
        "_current_fx_name": "backends/csx/capture/host_calls.py",
        "_fabric": "backends/csx/capture/leaves.py",
        "_hparams": "backends/csx/capture/leaves.py",
        "_hparams_initial": "backends/csx/capture/leaves.py",
        "_on_before_batch_transfer": "loops/lean.py",
        "_trainer": "backends/csx/capture/leaves.py",
        "current_epoch": "backends/csx/contract/frozen_reads.py",
        "global_step": "backends/csx/contract/frozen_reads.py",
        "log": "backends/csx/capture/host_calls.py",
        "logger": "backends/csx/contract/frozen_reads.py",
        "loggers": "backends/csx/contract/frozen_reads.py",
        "manual_backward": "loops/optimization.py",
        "on_before_batch_transfer": "callbacks/runner_hooks.py",
        "optimizer_step": "backends/csx/contract/frozen_reads.py",
        "optimizer_zero_grad": "backends/csx/contract/frozen_reads.py",
    },
    "lightning.pytorch.Trainer": {
        "_active_loop": "backends/csx/capture/host_calls.py",
        "_detect_anomaly": "loops/__init__.py",
        "_evaluation_loop": "backends/csx/program/payback.py",
        "_logger_connector": "backends/csx/capture/host_calls.py",
        "_results": "backends/csx/capture/host_calls.py",
        "_signal_connector": "backends/csx/plugins/consensus.py",
        "callback_metrics": "backends/csx/contract/frozen_reads.py",
        "current_epoch": "backends/csx/contract/frozen_reads.py",
        "evaluating": "backends/csx/capture/lightning_scope.py",
        "global_step": "backends/csx/contract/frozen_reads.py",
        "is_last_batch": "backends/csx/contract/frozen_reads.py",
        "logged_metrics": "backends/csx/contract/frozen_reads.py",
        "logger": "backends/csx/contract/frozen_reads.py",
        "loggers": "backends/csx/contract/frozen_reads.py",
        "predicting": "backends/csx/capture/lightning_scope.py",
        "profiler": "backends/csx/program/audit.py",
        "progress_bar_metrics": "backends/csx/contract/frozen_reads.py",
        "sanity_checking": "backends/csx/capture/lightning_scope.py",
        "testing": "backends/csx/capture/lightning_scope.py",
        "training": "backends/csx/capture/lightning_scope.py",
        "validating": "backends/csx/capture/lightning_scope.py",
    },
    "lightning.pytorch.callbacks.LearningRateFinder": {
        "_early_exit": "backends/csx/plugins/refusals.py",
    },
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "_last_checkpoint_saved": "backends/csx/plugins/torn.py",
        "_link_checkpoint": "callbacks/beside.py",
        "_save_checkpoint": "callbacks/beside.py",
        "file_exists": "callbacks/beside.py",
    },
    "lightning.pytorch.loggers.Logger": {
        "log_metrics": "trainer/config/run/running.py",
    },
    "lightning.pytorch.loops.evaluation_loop": {
        "_EvaluationLoop": "backends/csx/capture/host_calls.py",
    },
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": {
        "_combined_loader": "backends/csx/plugins/position.py",
        "_data_fetcher": "loops/evaluation.py",
        "_is_sequential": "loops/evaluation.py",
        "_on_evaluation_model_train": "loops/evaluation.py",
        "_results": "backends/csx/capture/host_calls.py",
        "_seen_batches_per_dataloader": "loops/evaluation.py",
        "_stage": "loops/evaluation.py",
    },
    "lightning.pytorch.loops.fetchers": {
        "_DataFetcher": "loops/dealing.py",
        "_DataLoaderIterDataFetcher": "loops/lean.py",
        "_PrefetchDataFetcher": "loops/fetching.py",
        "_profile_nothing": "loops/fetching.py",
    },
    "lightning.pytorch.loops.fit_loop": {
        "_FitLoop": "backends/csx/plugins/position.py",
    },
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "_combined_loader": "backends/csx/plugins/position.py",
        "_combined_loader_states_to_load": "loops/fit.py",
        "_data_fetcher": "loops/evaluation.py",
        "on_run_end": "callbacks/beside.py",
    },
    "lightning.pytorch.loops.loop": {
        "_Loop": "loops/building.py",
    },
    "lightning.pytorch.loops.loop._Loop": {
        "_loaded_from_state_dict": "loops/resuming.py",
    },
    "lightning.pytorch.loops.optimization.automatic": {
        "_AutomaticOptimization": "loops/optimization.py",
    },
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization": {
        "_make_backward_fn": "loops/optimization.py",
        "_make_zero_grad_fn": "loops/optimization.py",
        "_optimizer_step": "loops/optimization.py",
        "_training_step": "loops/optimization.py",
    },
    "lightning.pytorch.loops.optimization.manual": {
        "_ManualOptimization": "loops/optimization.py",
    },
    "lightning.pytorch.loops.prediction_loop": {
        "_PredictionLoop": "loops/evaluation.py",
    },
    "lightning.pytorch.loops.prediction_loop._PredictionLoop": {
        "_on_predict_model_train": "loops/evaluation.py",
    },
    "lightning.pytorch.loops.progress": {
        "_BaseProgress": "loops/building.py",
    },
    "lightning.pytorch.loops.training_epoch_loop": {
        "_TrainingEpochLoop": "backends/csx/capture/host_calls.py",
    },
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_batches_that_stepped": "callbacks/sparse.py",
        "_is_training_done": "loops/epoch.py",
        "_num_ready_batches_reached": "loops/epoch.py",
        "_results": "backends/csx/capture/host_calls.py",
        "_should_accumulate": "callbacks/check_loss.py",
        "_warning_cache": "loops/epoch.py",
    },
    "lightning.pytorch.loops.utilities": {
        "_block_parallel_sync_behavior": "loops/optimization.py",
        "_is_max_limit_reached": "loops/resuming.py",
    },
    "lightning.pytorch.overrides.distributed": {
        "_IndexBatchSamplerWrapper": "loops/shapes.py",
        "_sync_module_states": "backends/csx/plugins/parallel.py",
    },
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": {
        "_batch_sampler": "loops/shapes.py",
    },
    "lightning.pytorch.plugins": {
        "_PLUGIN_INPUT": "trainer/trainer.py",
    },
    "lightning.pytorch.strategies.DDPStrategy": {
        "_get_process_group_backend": "backends/csx/plugins/parallel.py",
        "_start_method": "backends/csx/plugins/parallel.py",
        "_timeout": "backends/csx/plugins/parallel.py",
    },
    "lightning.pytorch.strategies.Strategy": {
        "_checkpoint_io": "backends/checkpoints/plugin.py",
        "_lightning_optimizers": "backends/csx/capture/lightning_scope.py",
        "_optimizers": "backends/csx/capture/lightning_scope.py",
        "load_checkpoint": "backends/safe_load.py",
        "load_model_state_dict": "trainer/config/run/running.py",
        "load_optimizer_state_dict": "trainer/config/run/running.py",
        "training_step": "callbacks/inputs.py",
    },
    "lightning.pytorch.strategies.launchers": {
        "_MultiProcessingLauncher": "backends/csx/plugins/fork_launcher.py",
        "_SubprocessScriptLauncher": "backends/csx/plugins/launcher.py",
    },
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": {
        "_call_children_scripts": "backends/csx/plugins/launcher.py",
    },
    "lightning.pytorch.trainer.call": {
        "_call_strategy_hook": "loops/evaluation.py",
    },
    "lightning.pytorch.trainer.connectors.accelerator_connector": {
        "_AcceleratorConnector": "backends/csx/plugins/parallel.py",
    },
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {
        "_accelerator_flag": "backends/csx/plugins/precision.py",
        "_num_nodes_flag": "backends/csx/plugins/parallel.py",
        "_parallel_devices": "backends/csx/plugins/parallel.py",
        "_precision_flag": "backends/csx/plugins/precision.py",
        "_strategy_flag": "backends/csx/plugins/parallel.py",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": {
        "_callback_metrics": "callbacks/sparse.py",
        "_current_fx": "backends/csx/capture/host_calls.py",
        "_first_loop_iter": "backends/csx/capture/host_calls.py",
        "_logged_metrics": "callbacks/sparse.py",
        "_progress_bar_metrics": "loops/epoch.py",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_Metadata": "loops/logged.py",
        "_OUT_DICT": "loops/evaluation.py",
        "_ResultCollection": "backends/csx/capture/host_calls.py",
        "_ResultMetric": "backends/csx/capture/host_calls.py",
        "_Sync": "loops/logged.py",
        "_get_default_dtype": "backends/csx/capture/host_calls.py",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection": {
        "_extract_batch_size": "backends/csx/capture/host_calls.py",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._Sync": {
        "_should": "loops/logged.py",
    },
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": {
        "_sigterm_notifier_fn": "backends/csx/plugins/consensus.py",
        "_slurm_sigusr_handler_fn": "backends/csx/plugins/consensus.py",
    },
    "lightning.pytorch.trainer.states.TrainerState": {
        "fn": "backends/csx/capture/lightning_scope.py",
        "stage": "backends/csx/capture/lightning_scope.py",
    },
    "lightning.pytorch.tuner.lr_finder": {
        "_LRCallback": "loops/finite.py",
    },
    "lightning.pytorch.utilities.argparse": {
        "_parse_env_variables": "trainer/trainer.py",
    },
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": {
        "_iterator": "loops/fetching.py",
        "_load_state_dicts": "loops/epoch.py",
        "_spec": "loops/fetching.py",
    },
    "lightning.pytorch.utilities.combined_loader": {
        "_MaxSizeCycle": "loops/fetching.py",
    },
    "lightning.pytorch.utilities.combined_loader._MaxSizeCycle": {
        "_consumed": "loops/fetching.py",
    },
    "lightning.pytorch.utilities.exceptions": {
        "_TunerExitException": "loops/fit.py",
    },
    "torch.Tensor": {
        "_backward_hooks": "backends/csx/capture/readable.py",
        "_make_subclass": "backends/csx/contract/leaks.py",
        "_make_wrapper_subclass": "backends/csx/state/kept_gradients.py",
        "_post_accumulate_grad_hooks": "backends/csx/state/fake_swap.py",
        "_version": "backends/csx/capture/metrics.py",
    },
    "torch.TypedStorage": {
        "_untyped_storage": "backends/checkpoints/copying.py",
    },
    "torch.UntypedStorage": {
        "_cdata": "backends/checkpoints/copying.py",
    },
    "torch": {
        "_C": "backends/checkpoints/damage.py",
        "_is_all_true": "backends/csx/hyperparams/torch_optim.py",
        "any": "backends/csx/contract/overrides.py",
        "finfo": "backends/csx/graph/dtypes.py",
        "manual_seed": "backends/csx/contract/refusals.py",
        "seed": "backends/csx/contract/refusals.py",
        "set_rng_state": "backends/csx/contract/refusals.py",
    },
    "torch._C": {
        "DisableTorchFunction": "backends/csx/capture/host_calls.py",
        "PyTorchFileReader": "backends/checkpoints/damage.py",
        "_AutoDispatchBelowAutograd": "backends/csx/graph/lstm.py",
        "_DisableAutocast": "backends/csx/graph/passes/as_traced.py",
        "_VariableFunctions": "trainer/config/types/makes.py",
        "_current_autograd_node": "backends/csx/diagnostics/user_lines.py",
        "_disabled_torch_function_impl": "backends/csx/state/fake_swap.py",
        "_get_mkldnn_enabled": "backends/csx/contract/overrides.py",
        "_jit_get_schemas_for_operator": "backends/csx/contract/refusals.py",
        "_set_grad_enabled": "backends/csx/compile/host/host_fabric.py",
        "_set_mkldnn_enabled": "backends/csx/hyperparams/torch_optim.py",
        "_swap_tensor_impl": "backends/csx/state/fake_swap.py",
    },
    "torch._C._functorch": {
        "maybe_current_level": "backends/csx/contract/overrides.py",
    },
    "torch._dynamo": {
        "OptimizedModule": "trainer/function.py",
        "config": "backends/csx/capture/patch_table.py",
    },
    "torch._dynamo.config": {
        "patch": "backends/csx/capture/patch_table.py",
    },
    "torch._inductor": {
        "config": "backends/csx/compile/inductor/generate.py",
        "cpp_builder": "backends/torch_compiler.py",
        "cpu_vec_isa": "backends/csx/compile/inductor/toolchain.py",
    },
    "torch._inductor.cpp_builder": {
        "CppBuilder": "backends/torch_compiler.py",
        "CppTorchOptions": "backends/torch_compiler.py",
        "get_cpp_compiler": "backends/torch_compiler.py",
        "is_gcc": "backends/torch_compiler.py",
    },
    "torch._inductor.cpu_vec_isa.VecISA": {
        "check_build": "backends/csx/compile/inductor/toolchain.py",
    },
    "torch._inductor.exc": {
        "CppCompileError": "backends/csx/compile/inductor/generate.py",
        "InvalidCxxCompiler": "backends/torch_compiler.py",
    },
    "torch._ops": {
        "HigherOrderOperator": "backends/csx/compile/store/fingerprint.py",
        "OpOverload": "backends/csx/capture/comparison.py",
    },
    "torch._ops.OpOverload": {
        "_overloadpacket": "callbacks/flops.py",
        "_schema": "backends/csx/capture/comparison.py",
    },
    "torch._prims_common": {
        "compute_elementwise_output_strides": "backends/csx/graph/passes/rewriting.py",
        "suggest_memory_format": "backends/csx/graph/passes/decompositions.py",
    },
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": "backends/csx/capture/metrics.py",
        "DynamicOutputShapeException": "backends/csx/capture/metrics.py",
        "FakeTensor": "backends/csx/capture/metrics.py",
        "FakeTensorMode": "backends/csx/capture/step_inputs.py",
    },
    "torch._subclasses.fake_tensor.FakeTensorMode": {
        "_dispatch_impl": "backends/csx/graph/layouts.py",
    },
    "torch._utils": {
        "_validate_loaded_sparse_tensors": "backends/checkpoints/copying.py",
    },
    "torch.autograd": {
        "_engine_run_backward": "backends/csx/contract/function_mode.py",
        "_get_sequence_nr": "backends/csx/diagnostics/user_lines.py",
    },
    "torch.autograd.graph.Node": {
        "_sequence_nr": "backends/csx/diagnostics/user_lines.py",
    },
    "torch.distributed": {
        "all_gather": "backends/csx/contract/refusals.py",
        "all_gather_into_tensor": "backends/csx/contract/refusals.py",
        "all_gather_object": "backends/csx/contract/refusals.py",
        "all_reduce": "backends/csx/contract/refusals.py",
        "barrier": "backends/csx/contract/refusals.py",
        "broadcast": "backends/csx/contract/refusals.py",
        "broadcast_object_list": "backends/csx/contract/refusals.py",
        "gather": "backends/csx/contract/refusals.py",
        "recv": "backends/csx/contract/refusals.py",
        "reduce": "backends/csx/contract/refusals.py",
        "reduce_scatter": "backends/csx/contract/refusals.py",
        "send": "backends/csx/contract/refusals.py",
    },
    "torch.distributed.distributed_c10d": {
        "_get_default_store": "backends/csx/plugins/heartbeats.py",
    },
    "torch.distributions.Distribution": {
        "_validate_args": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.fx._lazy_graph_module": {
        "_LazyGraphModule": "backends/csx/compile/programs/parts.py",
        "_use_lazy_graph_module": "backends/csx/capture/trace.py",
    },
    "torch.fx._symbolic_trace": {
        "_Patcher": "backends/patches.py",
    },
    "torch.fx._symbolic_trace._Patcher": {
        "patch_method": "backends/patches.py",
    },
    "torch.fx.experimental.proxy_tensor": {
        "HANDLED_TYPES": "backends/csx/state/fake_swap.py",
        "_ProxyTensor": "backends/csx/graph/passes/rewriting.py",
        "_extract_tensor_metadata": "backends/csx/hyperparams/torch_optim.py",
        "_should_save_eager_input_vals": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.fx.experimental.proxy_tensor.PythonKeyTracer": {
        "create_node": "backends/csx/diagnostics/user_lines.py",
    },
    "torch.nested": {
        "as_nested_tensor": "backends/csx/contract/refusals.py",
        "narrow": "backends/csx/contract/refusals.py",
        "nested_tensor": "backends/csx/contract/refusals.py",
        "nested_tensor_from_jagged": "backends/csx/contract/refusals.py",
    },
    "torch.nn.Module": {
        "_apply": "backends/csx/contract/refusals.py",
        "_backward_hooks": "backends/csx/capture/readable.py",
        "_buffers": "backends/csx/capture/leaves.py",
        "_call_impl": "backends/csx/diagnostics/user_lines.py",
        "_compiled_call_impl": "trainer/function.py",
        "_forward_hooks": "backends/csx/capture/readable.py",
        "_forward_pre_hooks": "backends/csx/capture/readable.py",
        "_modules": "backends/csx/capture/leaves.py",
        "_parameters": "backends/csx/capture/leaves.py",
        "add_module": "backends/csx/contract/attributes.py",
        "register_buffer": "backends/csx/contract/attributes.py",
        "register_parameter": "backends/csx/contract/attributes.py",
    },
    "torch.nn.RNNBase": {
        "_flat_weight_refs": "backends/csx/capture/scope.py",
        "_flat_weights": "backends/csx/capture/scope.py",
    },
    "torch.nn.SyncBatchNorm": {
        "_check_non_zero_input_channels": "backends/csx/plugins/sync_batchnorm.py",
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": "backends/csx/plugins/refusals.py",
        "_NormBase": "backends/csx/contract/attributes.py",
    },
    "torch.nn.modules.batchnorm._NormBase": {
        "_check_input_dim": "backends/csx/plugins/sync_batchnorm.py",
    },
    "torch.nn.modules.dropout": {
        "_DropoutNd": "backends/csx/contract/attributes.py",
    },
    "torch.nn.utils.prune.BasePruningMethod": {
        "_tensor_name": "backends/csx/program/pruned.py",
    },
    "torch.ops": {
        "_c10d_functional": "backends/csx/graph/collectives.py",
    },
    "torch.ops.aten": {
        "_batch_norm_with_update": "backends/csx/graph/layouts.py",
        "_efficientzerotensor": "backends/csx/hyperparams/torch_optim.py",
        "_local_scalar_dense": "backends/csx/hyperparams/torch_functions.py",
        "_log_softmax": "backends/csx/costs/timing.py",
        "_log_softmax_backward_data": "backends/csx/graph/layouts.py",
        "_native_batch_norm_legit": "backends/csx/graph/layouts.py",
        "_native_batch_norm_legit_functional": "backends/csx/graph/passes/decompositions.py",
        "_scaled_dot_product_flash_attention": "backends/torch_versions.py",
        "_scaled_dot_product_flash_attention_backward": "backends/torch_versions.py",
        "_scaled_dot_product_flash_attention_for_cpu": "backends/csx/costs/machine.py",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "backends/csx/costs/machine.py",
        "_softmax": "backends/csx/costs/timing.py",
        "_to_copy": "backends/csx/compile/programs/library.py",
        "_unsafe_index": "backends/csx/graph/passes/cbfloat16.py",
        "_unsafe_view": "backends/csx/costs/graph_values.py",
        "_upsample_nearest_exact1d": "backends/csx/graph/passes/decompositions.py",
    },
    "torch.ops.aten._native_batch_norm_legit": {
        "no_stats": "backends/csx/graph/layouts.py",
    },
    "torch.optim.Optimizer": {
        "_optimizer_step_post_hooks": "backends/csx/state/optimizer_state.py",
        "_optimizer_step_pre_hooks": "backends/csx/state/optimizer_state.py",
    },
    "torch.optim": {
        "_adafactor": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.optim.adadelta": {
        "_single_tensor_adadelta": "backends/csx/hyperparams/updates.py",
    },
    "torch.optim.adagrad": {
        "_single_tensor_adagrad": "backends/csx/hyperparams/rounding.py",
    },
    "torch.optim.adam": {
        "_single_tensor_adam": "backends/csx/hyperparams/rounding.py",
    },
    "torch.optim.adamax": {
        "_single_tensor_adamax": "backends/csx/hyperparams/updates.py",
    },
    "torch.optim.asgd": {
        "_get_capturable_supported_devices": "backends/csx/hyperparams/torch_optim.py",
        "_single_tensor_asgd": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.optim.lr_scheduler.LRScheduler": {
        "_last_lr": "backends/schedules.py",
        "_opt_called": "backends/csx/capture/side_effects.py",
        "get_last_lr": "backends/csx/contract/frozen_reads.py",
        "step": "backends/csx/capture/host_calls.py",
    },
    "torch.optim.nadam": {
        "_single_tensor_nadam": "backends/csx/hyperparams/updates.py",
    },
    "torch.optim.optimizer": {
        "_get_value": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.optim.radam": {
        "_get_capturable_supported_devices": "backends/csx/hyperparams/torch_optim.py",
        "_single_tensor_radam": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.optim.rmsprop": {
        "_single_tensor_rmsprop": "backends/csx/hyperparams/updates.py",
    },
    "torch.optim.sgd": {
        "_single_tensor_sgd": "backends/csx/hyperparams/rounding.py",
    },
    "torch.random": {
        "manual_seed": "backends/csx/contract/refusals.py",
        "seed": "backends/csx/contract/refusals.py",
        "set_rng_state": "backends/csx/contract/refusals.py",
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": "backends/csx/compile/background/meanwhile.py",
        "_disable_current_modes": "backends/csx/capture/host_calls.py",
    },
    "torch.utils": {
        "_pytree": "backends/closures.py",
    },
    "torch.utils._pytree": {
        "SUPPORTED_NODES": "backends/csx/plugins/arguments.py",
        "TreeSpec": "backends/csx/capture/batch_spec.py",
        "keystr": "loops/ahead.py",
        "register_pytree_node": "backends/csx/contract/attributes.py",
        "tree_flatten": "backends/csx/capture/batch_spec.py",
        "tree_flatten_with_path": "backends/csx/capture/batch_spec.py",
        "tree_iter": "callbacks/sparse.py",
        "tree_leaves": "backends/csx/capture/batch_spec.py",
        "tree_map": "backends/closures.py",
        "tree_map_only": "backends/csx/capture/metrics.py",
        "tree_unflatten": "backends/csx/capture/batch_spec.py",
    },
    "torch.utils.checkpoint": {
        "CheckpointFunction": "backends/csx/hyperparams/torch_optim.py",
    },
    "torch.utils.data": {
        "_DatasetKind": "loops/fetching.py",
    },
    "torch.utils.data._DatasetKind": {
        "Map": "loops/fetching.py",
    },
    "torch.utils.data._utils": {
        "MP_STATUS_CHECK_INTERVAL": "loops/loader_errors.py",
    },
    "torch.utils.data._utils.fetch": {
        "_MapDatasetFetcher": "loops/ahead.py",
    },
    "torch.utils.data._utils.fetch._MapDatasetFetcher": {
        "fetch": "loops/loader_errors.py",
    },
    "torch.utils.data.dataloader": {
        "_BaseDataLoaderIter": "loops/fetching.py",
        "_MultiProcessingDataLoaderIter": "loops/loader_errors.py",
        "_SingleProcessDataLoaderIter": "loops/fetching.py",
    },
    "torch.utils.data.dataloader._BaseDataLoaderIter": {
        "_dataset_kind": "loops/fetching.py",
        "_next_data": "loops/fetching.py",
        "_next_index": "loops/loader_errors.py",
        "_num_workers": "loops/loader_errors.py",
        "_num_yielded": "loops/fetching.py",
        "_sampler_iter": "loops/loader_errors.py",
    },
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": {
        "_prefetch_factor": "loops/loader_errors.py",
        "_rcvd_idx": "loops/loader_errors.py",
        "_send_idx": "loops/loader_errors.py",
        "_task_info": "loops/loader_errors.py",
        "_try_get_data": "loops/loader_errors.py",
        "_workers": "loops/loader_errors.py",
    },
    "torchmetrics.Metric": {
        "_computed": "backends/csx/capture/host_calls.py",
        "_copy_state_dict": "backends/csx/capture/metrics.py",
        "_defaults": "backends/csx/capture/metrics.py",
        "_forward_cache": "backends/csx/capture/host_calls.py",
        "_reductions": "backends/csx/capture/host_calls.py",
        "_update_count": "backends/csx/capture/host_calls.py",
        "compute": "backends/csx/capture/metrics.py",
        "forward": "backends/csx/capture/metrics.py",
        "full_state_update": "backends/csx/capture/host_calls.py",
        "reset": "backends/csx/capture/metrics.py",
        "update": "backends/csx/capture/metrics.py",
    },
    "torchmetrics.MetricCollection": {
        "_enable_compute_groups": "backends/csx/capture/host_calls.py",
        "_groups_checked": "backends/csx/capture/host_calls.py",
    },
    "torchmetrics.aggregation.BaseAggregator": {
        "_cast_and_nan_check_input": "backends/csx/capture/host_calls.py",
    },
    "torchmetrics.utilities.compute": {
        "normalize_logits_if_needed": "backends/csx/capture/host_calls.py",
    },
}
