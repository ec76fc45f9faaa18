"""A converted file, written out, reads as what was converted."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from old_files import SGD, old_file

from fulgurite.config.document.reading import parse
from fulgurite.config.legacy.converting import convert
from fulgurite.config.legacy.old_keys import ROWS
from fulgurite.config.legacy.yaml_text import to_yaml


def test_a_file_is_written_with_comments_where_keys_would_be() -> None:
    params = {
        "runconfig": {
            "max_steps": 5,
            "mgmt_address": "10.0.0.1",
            "job_labels": ["a"],
            "check_loss_values": False,
        },
        "model": {"class_path": "my.Net"},
        "optimizer": {**SGD, "max_gradient_norm": 1.0, "max_loss_scale": 8.0},
        "eval_input": {"data_processor": "my.data.val", "sizes": {"a": {"b": [1, 2]}}},
    }
    assert to_yaml(convert(params)) == TEXT


TEXT = """\
trainer:
  init:
    # runconfig.mgmt_address ("10.0.0.1"): says where a cluster is managed; programs run on this
    #   machine
    # runconfig.job_labels ([a]): is for a cluster's queue; nothing is queued here
    model: {class_path: my.Net}
    optimizer:
      SGD: {lr: 0.1}
    precision:
      # optimizer.max_loss_scale (8.0): had no effect: the loss scale is not dynamic
      max_gradient_norm: 1.0
      enabled: false
    loop: {max_steps: 5}
    callbacks:
      - CheckLoss: null
  validate:
    val_dataloader:
      data_processor: my.data.val
      sizes:
        a: {b: [1, 2]}
  validate_all:
    val_dataloaders:
      data_processor: my.data.val
      sizes:
        a: {b: [1, 2]}
"""


def test_the_loader_of_validation_is_written_once() -> None:
    data = {"data_processor": "my.data.val"}
    text = to_yaml(convert(old_file(train_input=data, eval_input=data)))
    assert text.endswith(
        "  fit:\n"
        "    train_dataloader: {data_processor: my.data.val}\n"
        "    val_dataloader: &val_dataloader {data_processor: my.data.val}\n"
        "  validate:\n"
        "    val_dataloader: *val_dataloader\n"
        "  validate_all:\n"
        "    val_dataloaders: *val_dataloader\n"
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(
        ["yes", "1e-5", "0x1f", "12:30", "2001-01-01", "<<", "=", "~", "- a", "#", "a: b"]
    )
)
keys = st.text("abc_.: #-5", min_size=1, max_size=6) | st.integers(0, 9)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
table_sections = {
    section: st.dictionaries(
        st.sampled_from([r.old_path[1] for r in ROWS if r.old_path[0] == section]),
        values,
        max_size=6,
    )
    for section in ("runconfig", "optimizer", "wandb")
}
old_files = st.fixed_dictionaries(
    {
        "model": st.dictionaries(keys, values, max_size=4),
        "optimizer": table_sections["optimizer"].map(lambda given: {**SGD, **given}),
    },
    optional={
        "runconfig": table_sections["runconfig"],
        "wandb": table_sections["wandb"],
        "train_input": st.dictionaries(keys, values, max_size=4),
        "eval_input": st.dictionaries(keys, values, max_size=4),
        "sparsity": values,
    },
)


@given(old_files)
@settings(max_examples=100, deadline=None)
def test_what_is_written_reads_as_what_was_converted(old: dict[str, Any]) -> None:
    converted = convert(old)
    text = to_yaml(converted)
    assert typed(parse(text, "<text>").data) == typed(converted.params)
    assert typed(yaml.safe_load(text)) == typed(converted.params)


def typed(value: Any) -> Any:
    """A value that equals another only if all types are the same."""
    if isinstance(value, dict):
        return {(type(key), key): typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value
