"""The table of patches: what is replaced in other people's code while a step is traced.

``patches`` is read from top to bottom; a row's replacement is in the room that it is imported from:
those of ``contract`` in ``refusals`` and ``frozen_reads``, those of ``state`` in ``fake_swap`` and
``gradients``. Each row says why it is there and what it was checked with. Some patches hold for a
part of a trace only, and are made where that part begins: the methods of ``nn.Module``
(``contract/attributes``), ``backward()`` (``contract/function_mode``), ``torch.any``
(``contract/overrides``), logging and schedulers (``host_calls``), the making of nodes
(``diagnostics/user_lines``), logs of second traces (``program/audit``), warnings of a build
(``costs/build_record``). Those of the compiler hold while it runs (``compile/inductor``:
``generate``, ``wrapper``, ``changes``, ``toolchain``), and one while its table of decompositions is
made (``graph/passes/decompositions``). That of ``zero_grad()`` on the host holds as long as
anybody's fit does (``plugins/host_optimizers``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config

from fulgurite.backends.csx.capture.lightning_scope import Answers, note_answers
from fulgurite.backends.csx.capture.metrics import static_metrics
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.contract import (
    impure_functions,
    reads_of_lightning,
    refused_calls,
    warn_of_frozen_reads,
)
from fulgurite.backends.csx.diagnostics.user_lines import (
    LIBRARIES,
    UserLine,
    modules_under,
    user_modules,
)
from fulgurite.backends.csx.graph.dtypes import cbfloat16_facts
from fulgurite.backends.csx.graph.fakes import laid_out_by_kernels
from fulgurite.backends.csx.hyperparams.number_functions import traced_math
from fulgurite.backends.csx.hyperparams.torch_optim import (
    as_operations,
    averaged_models,
    eager_updates,
    fused_rounding,
    plain_library_code,
)
from fulgurite.backends.csx.state import plain_options, traced_as_fakes, unseen_clearing
from fulgurite.backends.patches import Patch, applied


def patches(scope: Scope, line: Callable[[], UserLine | None], answers: Answers) -> Iterator[Patch]:
    """The patches that hold for a whole trace.

    Args:
        scope: what the step works on.
        line: the user's line that runs now.
        answers: receives what the step reads of the trainer's state.
    """
    yield from static_metrics(scope.module)  # torchmetrics: no branches on values
    # torch.optim: an update is one operation; 16-bit weights, as fused kernels
    yield from as_operations(fused_rounding(scope.optimizers))
    # torch.optim and BatchNorm: counts and numbers that are traced
    yield from eager_updates(scope.optimizers)
    yield from averaged_models()  # torch.optim: an average looks at no count
    yield from laid_out_by_kernels()  # torch.fx: where results lie
    yield from traced_as_fakes()  # torch.fx: fakes in the place of state
    yield from unseen_clearing()  # torch: zero_grad() does not depend on what it clears
    yield from plain_library_code()  # torch, logging: what only pays eagerly, or prints
    yield from refused_calls(line)  # torch: functions whose use is an error
    if scope.fp16_type == "cbfloat16":
        yield from cbfloat16_facts()  # torch.finfo
    yield from traced_math()  # math: functions of traced numbers
    yield from note_answers(answers)  # lightning: the trainer's state selects the program
    if scope.python_runs_once:
        yield from reads_of_lightning()  # lightning: counters, metrics and loggers, with a warning
        yield from impure_functions()  # time, random, numpy.random, with a warning


@contextlib.contextmanager
def traceable(
    scope: Scope, line: Callable[[], UserLine | None], answers: Answers
) -> Iterator[None]:
    """Let a step be traced while the block runs; the arguments are those of ``patches``."""
    with (
        applied(patches(scope, line, answers), _importers(scope)),
        plain_options(scope.optimizers),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),  # the step may torch.compile
        warn_of_frozen_reads() if scope.python_runs_once else contextlib.nullcontext(),
        torch.inference_mode(False),
    ):
        yield


def _importers(scope: Scope) -> Iterator[dict[str, Any]]:
    """Global names that patched functions may have been imported into.

    Those of the user's modules, and of the packages that define the classes of what the step works
    on: they may be installed (an optimizer's), or in no list of modules (a file run by its path).
    """
    yield from map(vars, user_modules())
    kinds = {kind for item in scope.objects() for kind in type(item).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - LIBRARIES
    for package in packages:
        yield from map(vars, modules_under(package))
    for kind in kinds:
        for item in vars(kind).values() if kind.__module__ not in sys.modules else ():
            names = item.__globals__ if isinstance(item, FunctionType) else {}
            if names.get("__name__") == kind.__module__:  # no decorator's, of another module
                yield names
