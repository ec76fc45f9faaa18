"""Parameter files of the old form, for tests."""

from __future__ import annotations

from typing import Any

from fulgurite.config.legacy.converting import Converted

SGD = {"optimizer_type": "SGD", "learning_rate": 0.1}


def old_file(**sections: Any) -> dict[str, Any]:
    """An old file with some sections."""
    return {"model": {"name": "Net"}, **sections}


def init_of(converted: Converted) -> dict[str, Any]:
    """``trainer.init`` of a file without mistakes."""
    assert not converted.problems
    init: dict[str, Any] = converted.params["trainer"]["init"]
    return init


OLD = """
train_input: {data_processor: my.data.Train, batch_size: 8, micro_batch_size: 4}
eval_input: {data_processor: my.data.Val, batch_size: 8}
model: {name: my.model.Net, hidden: 32, mixed_precision: True, fp16_type: cbfloat16}
optimizer:
  optimizer_type: AdamW
  betas: [0.9, 0.95]
  correct_bias: True
  learning_rate:
    - {scheduler: Linear, initial_learning_rate: 0.0, end_learning_rate: 0.01, total_iters: 10}
    - {scheduler: CosineDecay, initial_learning_rate: 0.01, end_learning_rate: 0.0, steps: 90}
  loss_scaling_factor: dynamic
  max_gradient_norm: 1.0
  log_summaries: True
runconfig:
  target_device: CSX
  num_csx: 1
  num_wgt_servers: 24
  max_steps: 100
  eval_frequency: 50
  eval_steps: 5
  checkpoint_steps: 50
  checkpoint_path: start.ckpt
  max_checkpoints: 2
  log_steps: 10
  seed: 1
  retrace_every_iteration: True
"""
