"""What is changed around a step while it is traced, so that its code becomes a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from fulgurite.backends.csx.capture.host_calls import static_metrics
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.contract.frozen_reads import warn_of_frozen_reads
from fulgurite.backends.csx.contract.impure import impure_functions
from fulgurite.backends.csx.contract.refusals import refused_calls
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.dtypes import cbfloat16_facts
from fulgurite.backends.csx.hyperparams.python_math import traced_math
from fulgurite.backends.csx.hyperparams.rounding import fused_rounding
from fulgurite.backends.csx.hyperparams.torch_optim import eager_updates, plain_library_code
from fulgurite.backends.patches import patched


@contextlib.contextmanager
def traceable(scope: Scope, line: Callable[[], UserLine | None]) -> Iterator[None]:
    """Let torch, torchmetrics, clocks and the like take their static forms, warn, or refuse.

    Args:
        scope: what the step works on.
        line: the user's line that runs now.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(static_metrics(scope.module))
        stack.enter_context(fused_rounding(scope.optimizers))
        stack.enter_context(eager_updates(scope.optimizers))
        stack.enter_context(traced_math())
        stack.enter_context(plain_library_code())
        if scope.freezes:
            stack.enter_context(warn_of_frozen_reads())
            stack.enter_context(patched(impure_functions(scope.module)))
        stack.enter_context(patched(refused_calls(line)))
        if scope.fp16_type == "cbfloat16":
            stack.enter_context(patched(cbfloat16_facts()))
        stack.enter_context(torch.inference_mode(False))
        yield
