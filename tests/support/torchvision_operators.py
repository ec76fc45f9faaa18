"""A pytest plugin: torchvision beside a torch for the CPU, as far as timm's models need it.

The torchvision on PyPI is built for CUDA: its operators do not load, and then its Python part is
not imported either, nor Lightning, which asks for it. Declared and without a kernel, the two that
it looks for let it be imported; timm's models call none. Loaded by ``-p``, before all else.
"""

from __future__ import annotations

import contextlib
import importlib.util

import torch

with contextlib.suppress(ImportError):
    if importlib.util.find_spec("torchvision") is not None:
        declared = torch.library.Library("torchvision", "FRAGMENT")  # as long as it lives
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
