"""One traced step: Lightning's own code, run once on fakes, and what is to be known of that.

Rooms above import from here: ``capture`` and what it gives (``CapturedStep``), scopes, and traces
that are compared. This room imports from every room listed before it but ``compile``.

captured_step    trace a step as often as it takes, and what that gives; again, to compare it
trace            one run of the step's code: what is put around it; or as it is, without a program
patch_table      what is replaced in other people's code meanwhile, read from top to bottom
step_inputs      the fakes that the step works on
side_effects     what the step left on the host, and what becomes of it
scope            what a step works on; how a trace is undone
lightning_scope  the same of a LightningModule and its Trainer
host_calls       what happens on the host after every step, self.log among it
metrics          torchmetrics, where no program can do what they do
recording        what is kept of a trace: operations, updates, and where its results go
comparison       the first difference of two traces
births           state that the first step makes
"""

from fulgurite.backends.csx.capture.captured_step import CapturedStep as CapturedStep
from fulgurite.backends.csx.capture.captured_step import FinishedTrace as FinishedTrace
from fulgurite.backends.csx.capture.captured_step import as_first_traced as as_first_traced
from fulgurite.backends.csx.capture.captured_step import capture as capture
from fulgurite.backends.csx.capture.captured_step import retrace as retrace
from fulgurite.backends.csx.capture.comparison import check_results as check_results
from fulgurite.backends.csx.capture.comparison import check_same as check_same
from fulgurite.backends.csx.capture.host_calls import Accumulator as Accumulator
from fulgurite.backends.csx.capture.host_calls import ClosureCall as ClosureCall
from fulgurite.backends.csx.capture.host_calls import LogCall as LogCall
from fulgurite.backends.csx.capture.host_calls import NumberCall as NumberCall
from fulgurite.backends.csx.capture.host_calls import begin_mean as begin_mean
from fulgurite.backends.csx.capture.host_calls import begin_step as begin_step
from fulgurite.backends.csx.capture.host_calls import logs_reduced_later as logs_reduced_later
from fulgurite.backends.csx.capture.lightning_scope import LightningScope as LightningScope
from fulgurite.backends.csx.capture.lightning_scope import answers_hold as answers_hold
from fulgurite.backends.csx.capture.lightning_scope import (
    hooks_between_steps as hooks_between_steps,
)
from fulgurite.backends.csx.capture.lightning_scope import overrides as overrides
from fulgurite.backends.csx.capture.lightning_scope import reads_gradients as reads_gradients
from fulgurite.backends.csx.capture.lightning_scope import step_clears as step_clears
from fulgurite.backends.csx.capture.recording import Outputs as Outputs
from fulgurite.backends.csx.capture.recording import Recording as Recording
from fulgurite.backends.csx.capture.recording import output_writer as output_writer
from fulgurite.backends.csx.capture.recording import result_of as result_of
from fulgurite.backends.csx.capture.scope import Exchange as Exchange
from fulgurite.backends.csx.capture.scope import Scope as Scope
from fulgurite.backends.csx.capture.scope import undo_afterwards as undo_afterwards
from fulgurite.backends.csx.capture.scope import undo_on_failure as undo_on_failure
from fulgurite.backends.csx.capture.trace import Trace as Trace
from fulgurite.backends.csx.capture.trace import can_run as can_run
from fulgurite.backends.csx.capture.trace import run_as_lightning as run_as_lightning
