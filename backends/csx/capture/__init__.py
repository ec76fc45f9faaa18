"""One traced step: Lightning's own code, run once on fakes, and what is to be known of that.

Rooms above import from here: ``capture`` and what it gives (``Captured``), scopes, and traces that
are compared. This room imports from every room listed before it but ``compile``.

captured         trace a step as often as it takes, and what that gives; again, to compare it
trace            one run of the step's code: what is put around it, read from top to bottom
patch_table      what is replaced in other people's code meanwhile, read from top to bottom
step_inputs      the fakes that the step works on
side_effects     what the step left on the host, and what becomes of it
scope            what a step works on; how a trace is undone
lightning_scope  the same of a LightningModule and its Trainer
discovery        the same of a function: found along the names in its code
batch_spec       what batches must look like, in which sizes they vary, what steps change in them
batch_objects    batches that are objects
leaves           tensors inside lists, dicts and objects
trees            what the step did to these
host_calls       what happens on the host after every step, self.log among it
metrics          torchmetrics, where no program can do what they do
recording        what is kept of a trace: operations, updates, and where its results go
comparison       the first difference of two traces; state that the first one made
python_state     what a second trace changes, compared and put back
readable         what the host may have changed that the step can read
"""

from fulgurite.backends.csx.capture.batch_objects import Objects as Objects
from fulgurite.backends.csx.capture.batch_objects import keystr as keystr
from fulgurite.backends.csx.capture.batch_spec import CONSTANTS as CONSTANTS
from fulgurite.backends.csx.capture.batch_spec import SHAPES as SHAPES
from fulgurite.backends.csx.capture.batch_spec import BatchChanges as BatchChanges
from fulgurite.backends.csx.capture.batch_spec import Leaf as Leaf
from fulgurite.backends.csx.capture.batch_spec import Path as Path
from fulgurite.backends.csx.capture.batch_spec import Shapes as Shapes
from fulgurite.backends.csx.capture.batch_spec import Varying as Varying
from fulgurite.backends.csx.capture.batch_spec import shapes_of as shapes_of
from fulgurite.backends.csx.capture.batch_spec import too_many as too_many
from fulgurite.backends.csx.capture.batch_spec import varying as varying
from fulgurite.backends.csx.capture.batch_spec import without as without
from fulgurite.backends.csx.capture.captured import Captured as Captured
from fulgurite.backends.csx.capture.captured import FinishedTrace as FinishedTrace
from fulgurite.backends.csx.capture.captured import as_first_traced as as_first_traced
from fulgurite.backends.csx.capture.captured import capture as capture
from fulgurite.backends.csx.capture.captured import retrace as retrace
from fulgurite.backends.csx.capture.comparison import check_results as check_results
from fulgurite.backends.csx.capture.comparison import check_same as check_same
from fulgurite.backends.csx.capture.discovery import Discovered as Discovered
from fulgurite.backends.csx.capture.discovery import discover as discover
from fulgurite.backends.csx.capture.host_calls import Accumulator as Accumulator
from fulgurite.backends.csx.capture.host_calls import ClosureCall as ClosureCall
from fulgurite.backends.csx.capture.host_calls import LogCall as LogCall
from fulgurite.backends.csx.capture.host_calls import NumberCall as NumberCall
from fulgurite.backends.csx.capture.host_calls import begin_mean as begin_mean
from fulgurite.backends.csx.capture.host_calls import begin_step as begin_step
from fulgurite.backends.csx.capture.host_calls import reduced_later as reduced_later
from fulgurite.backends.csx.capture.leaves import Trees as Trees
from fulgurite.backends.csx.capture.leaves import holders_in as holders_in
from fulgurite.backends.csx.capture.leaves import lies_in as lies_in
from fulgurite.backends.csx.capture.lightning_scope import LightningScope as LightningScope
from fulgurite.backends.csx.capture.lightning_scope import hold as hold
from fulgurite.backends.csx.capture.lightning_scope import (
    hooks_between_steps as hooks_between_steps,
)
from fulgurite.backends.csx.capture.lightning_scope import overrides as overrides
from fulgurite.backends.csx.capture.lightning_scope import reads_gradients as reads_gradients
from fulgurite.backends.csx.capture.python_state import Change as Change
from fulgurite.backends.csx.capture.python_state import PythonState as PythonState
from fulgurite.backends.csx.capture.readable import Readable as Readable
from fulgurite.backends.csx.capture.recording import Outputs as Outputs
from fulgurite.backends.csx.capture.recording import Recording as Recording
from fulgurite.backends.csx.capture.recording import builder as builder
from fulgurite.backends.csx.capture.recording import passed_on as passed_on
from fulgurite.backends.csx.capture.recording import result_of as result_of
from fulgurite.backends.csx.capture.scope import Scope as Scope
from fulgurite.backends.csx.capture.scope import undone as undone
from fulgurite.backends.csx.capture.scope import undone_on_failure as undone_on_failure
from fulgurite.backends.csx.capture.trace import Trace as Trace
from fulgurite.backends.csx.capture.trees import where_put as where_put
