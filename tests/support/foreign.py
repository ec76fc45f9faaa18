"""What trainer parts of parameter files from elsewhere look like: each key that they have, once.

A *fragment* is some keys of ``trainer.init``; a file is ``BASE`` with one fragment in it. Models
and data are other people's and cannot be imported.
"""

from __future__ import annotations

from typing import Any

_DATA = {"data_processor": "SomeProcessor", "data_dir": "./data", "batch_size": 8, "shuffle": False}
_LINE = {"LinearLR": {"initial_learning_rate": 0.0, "end_learning_rate": 1e-3, "total_iters": 10}}
_COSINE = {
    "CosineDecayLR": {"initial_learning_rate": 1e-3, "end_learning_rate": 0.0, "total_iters": 90}
}
_MICRO_BATCH = "csx.performance.micro_batch_size"

BASE: dict[str, Any] = {
    "backend": {"backend_type": "CSX"},
    "seed": 1,
    "model_dir": "./model_dir",
    "model": {"name": "gpt", "vocab_size": 50257, "norm": {"eps": 1e-5}, "layers": [1, 2]},
    "optimizer": {"AdamW": {"betas": [0.9, 0.95], "weight_decay": 0.1, "correct_bias": True}},
    "schedulers": [{"SequentialLR": {"schedulers": [_LINE, _COSINE]}}],
    "precision": {"enabled": True, "fp16_type": "cbfloat16", "loss_scaling_factor": "dynamic"},
    "loop": {"max_steps": 100, "eval_frequency": 50, "eval_steps": 5},
    "logging": {"log_steps": 10},
}

STAGES: dict[str, Any] = {
    "fit": {"train_dataloader": _DATA, "val_dataloader": _DATA},
    "validate": {"val_dataloader": _DATA},
    "validate_all": {"val_dataloaders": _DATA},
}

FRAGMENTS: dict[str, dict[str, Any]] = {
    "nothing more": {},
    # where it runs
    "no device": {"backend": None},
    "systems": {"backend": {"backend_type": "CSX", "cluster_config": {"num_csx": 1}}},
    "input workers": {
        "backend": {"backend_type": "CSX", "cluster_config": {"num_workers_per_csx": 2}}
    },
    "servers": {"backend": {"backend_type": "CSX", "cluster_config": {"max_wgt_servers": 24}}},
    "queue": {
        "backend": {
            "backend_type": "CSX",
            "cluster_config": {
                "job_labels": ["a=b"],
                "job_priority": "p2",
                "mount_dirs": ["/data"],
            },
        }
    },
    "flag in the backend": {
        "backend": {"backend_type": "CSX", "csx.debug.implicit_cast_cb16_to_fp32": True}
    },
    # optimizers
    "optimizer without arguments": {"optimizer": {"AdaFactor": {}}},
    "optimizer in lower case": {"optimizer": {"adamw": {"eps": 1e-6, "correct_bias": True}}},
    "Adam with correct_bias": {"optimizer": {"Adam": {"eps": 1e-8, "correct_bias": True}}},
    "learning_rate": {"optimizer": {"SGD": {"learning_rate": 1e-3, "momentum": 0.9}}},
    "adjust_learning_rate": {"optimizer": {"AdamW": {"adjust_learning_rate": {"kernel": 0.5}}}},
    "groups by glob": {
        "optimizer": {
            "AdamW": {
                "params": [
                    {"params": ["*.weight", "*.token"], "tag": "decayed"},
                    {"params": ["*embeddings*"], "tag": "slow"},
                ]
            }
        },
        "schedulers": [
            {
                "CosineDecayWD": {
                    "initial_val": 0.04,
                    "end_val": 0.4,
                    "total_iters": 100,
                    "param_group_tags": "decayed",
                }
            },
            {"SequentialLR": {"schedulers": [_LINE, _COSINE], "param_group_tags": "slow"}},
        ],
    },
    # schedulers
    "one scheduler": {"schedulers": [_COSINE]},
    "ConstantLR": {"schedulers": [{"ConstantLR": {"learning_rate": 1e-4}}]},
    "InverseSquareRootDecayLR": {
        "schedulers": [{"InverseSquareRootDecayLR": {"scale": 1.0, "warmup_steps": 100}}]
    },
    "a whole number as initial": {
        "schedulers": [{"CosineDecayLR": {**_COSINE["CosineDecayLR"], "initial_learning_rate": 0}}]
    },
    "constant, then cosine": {
        "schedulers": [
            {
                "SequentialLR": {
                    "schedulers": [
                        _LINE,
                        {
                            "CosineAnnealingLR": {
                                "initial_learning_rate": 0.025,
                                "T_max": 50,
                                "eta_min": 0.0,
                            }
                        },
                        {"ConstantLR": {"learning_rate": 1e-5}},
                    ]
                }
            }
        ]
    },
    "ScalePerParamLR": {
        "schedulers": [
            {"ScalePerParamLR": {"scheduler": {"SequentialLR": {"schedulers": [_LINE, _COSINE]}}}}
        ]
    },
    # precision
    "bfloat16": {"precision": {"fp16_type": "bfloat16", "loss_scaling_factor": 1.0}},
    "all of precision": {
        "precision": {
            **BASE["precision"],
            "precision_opt_level": 1,
            "max_gradient_norm": 1.0,
            "log_loss_scale": True,
            "steps_per_increase": 30000,
        }
    },
    "sparsity": {
        "sparsity": {
            "algorithm": "rigl",
            "sparsity": 0.75,
            "init_method": "random",
            "param_filter": ["*_layer.*weight"],
            "update": {"freq": 100, "stop": 3584},
            "drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 3584},
        }
    },
    # loop, checkpoint, logging
    "num_steps": {"loop": {"num_steps": 100}},
    "checkpoint": {
        "checkpoint": {
            "steps": 1000,
            "save_initial_checkpoint": False,
            "disable_strict_checkpoint_loading": True,
            "checkpoint_name": "checkpoint_{step}.mdl",
        }
    },
    "log level": {"logging": {"log_steps": 1, "log_level": "INFO"}},
    # callbacks and loggers
    "ComputeNorm": {"callbacks": [{"ComputeNorm": {}}]},
    "no CheckLoss": {"callbacks": [{"CheckLoss": None}]},
    "KeepNCheckpoints": {"callbacks": [{"KeepNCheckpoints": {"n": 3}}]},
    "LoadCheckpointStates": {
        "callbacks": [{"LoadCheckpointStates": {"load_checkpoint_states": "model"}}]
    },
    "flags": {
        "callbacks": [
            {
                "GlobalFlags": {
                    "csx.debug.compile_crd_memory_gi": 67,
                    "csx.debug.execute_crd_memory_gi": 50,
                    "csx.performance.transfer_processes": 15,
                }
            }
        ]
    },
    "micro-batches": {
        "callbacks": [
            {"ScopedTrainFlags": {_MICRO_BATCH: 256}},
            {"ScopedValidateFlags": {_MICRO_BATCH: "explore"}},
        ]
    },
    "evaluation": {
        "callbacks": [
            {
                "EleutherEvalHarness": {
                    "eeh_args": {"tasks": "winogrande", "num_fewshot": 0},
                    "keep_data_dir": False,
                    "batch_size": 4,
                    "data_dir": "./data",
                    "flags": {_MICRO_BATCH: None},
                }
            }
        ]
    },
    "telemetry": {"loggers": [{"TelemetryLogger": {}}]},
    "TensorBoardLogger": {"loggers": [{"TensorBoardLogger": {"legacy_event_dirs": True}}]},
}


def foreign_file(fragment: str) -> dict[str, Any]:
    """A whole file with one of the fragments; a key that is None there is left out."""
    init = {**BASE, **FRAGMENTS[fragment]}
    given = {key: value for key, value in init.items() if value is not None}
    return {"trainer": {"init": given, **STAGES}}
