"""What persists from one step to the next: the tensors that a program updates in place.

Tracing (capture), numbers of param groups (hyperparams), rules (contract), programs and plugins
import from here; this room imports from ``diagnostics``, ``graph`` and ``streaming`` alone.

storage              places that hold tensors, and which inputs of a program these are
binding              the tensors that are in these places when a program runs
python_objects       whose class it is, what is in it, and how that is remembered and put back
optimizer_state      the state of optimizers before the first step
optimizer_checks     which of it no program can hold
conditional_updates  updates of optimizers that may not count, or are others the first time
gradients            p.grad in a trace
kept_gradients       where gradients are between steps, and what stands in p.grad meanwhile
fake_swap            fakes behind the user's own tensors
sharded              tensors of which each of several processes holds a part
in_files             state that is put into files, where a budget is less than all of it
"""

from fulgurite.backends.csx.state.binding import Binding as Binding
from fulgurite.backends.csx.state.binding import OptimizerStates as OptimizerStates
from fulgurite.backends.csx.state.conditional_updates import skipped_where as skipped_where
from fulgurite.backends.csx.state.fake_swap import ReplacedData as ReplacedData
from fulgurite.backends.csx.state.fake_swap import StateFakeTensor as StateFakeTensor
from fulgurite.backends.csx.state.fake_swap import fake_for as fake_for
from fulgurite.backends.csx.state.fake_swap import gradient_hooks as gradient_hooks
from fulgurite.backends.csx.state.fake_swap import swap as swap
from fulgurite.backends.csx.state.fake_swap import traced_as_fakes as traced_as_fakes
from fulgurite.backends.csx.state.gradients import GradientHandover as GradientHandover
from fulgurite.backends.csx.state.gradients import Gradients as Gradients
from fulgurite.backends.csx.state.gradients import StageGradients as StageGradients
from fulgurite.backends.csx.state.gradients import begin_handover as begin_handover
from fulgurite.backends.csx.state.gradients import gradient_mismatch as gradient_mismatch
from fulgurite.backends.csx.state.gradients import unseen_clearing as unseen_clearing
from fulgurite.backends.csx.state.in_files import keep_within_budget as keep_within_budget
from fulgurite.backends.csx.state.kept_gradients import DroppedGradient as DroppedGradient
from fulgurite.backends.csx.state.kept_gradients import UnseenGradients as UnseenGradients
from fulgurite.backends.csx.state.kept_gradients import forget_dropped as forget_dropped
from fulgurite.backends.csx.state.kept_gradients import held_gradients as held_gradients
from fulgurite.backends.csx.state.optimizer_checks import check_optimizer as check_optimizer
from fulgurite.backends.csx.state.optimizer_state import NewState as NewState
from fulgurite.backends.csx.state.optimizer_state import around_steps as around_steps
from fulgurite.backends.csx.state.optimizer_state import before_steps as before_steps
from fulgurite.backends.csx.state.optimizer_state import check_new_state as check_new_state
from fulgurite.backends.csx.state.optimizer_state import init_state as init_state
from fulgurite.backends.csx.state.optimizer_state import plain_options as plain_options
from fulgurite.backends.csx.state.optimizer_state import with_inner as with_inner
from fulgurite.backends.csx.state.python_objects import ARRAYS as ARRAYS
from fulgurite.backends.csx.state.python_objects import GENERATORS as GENERATORS
from fulgurite.backends.csx.state.python_objects import Owner as Owner
from fulgurite.backends.csx.state.python_objects import PathStep as PathStep
from fulgurite.backends.csx.state.python_objects import Snapshot as Snapshot
from fulgurite.backends.csx.state.python_objects import attributes_of as attributes_of
from fulgurite.backends.csx.state.python_objects import child_name as child_name
from fulgurite.backends.csx.state.python_objects import children as children
from fulgurite.backends.csx.state.python_objects import content as content
from fulgurite.backends.csx.state.python_objects import elements as elements
from fulgurite.backends.csx.state.python_objects import filled_cells as filled_cells
from fulgurite.backends.csx.state.python_objects import filled_slots as filled_slots
from fulgurite.backends.csx.state.python_objects import owner_of as owner_of
from fulgurite.backends.csx.state.python_objects import refill as refill
from fulgurite.backends.csx.state.sharded import ShardedTensor as ShardedTensor
from fulgurite.backends.csx.state.sharded import gathered as gathered
from fulgurite.backends.csx.state.sharded import is_cut as is_cut
from fulgurite.backends.csx.state.sharded import is_finite as is_finite
from fulgurite.backends.csx.state.sharded import part_of as part_of
from fulgurite.backends.csx.state.sharded import shard_parameters as shard_parameters
from fulgurite.backends.csx.state.sharded import shard_state as shard_state
from fulgurite.backends.csx.state.sharded import writing_wholes as writing_wholes
from fulgurite.backends.csx.state.storage import TORCHS_OWN as TORCHS_OWN
from fulgurite.backends.csx.state.storage import Layout as Layout
from fulgurite.backends.csx.state.storage import NewPlace as NewPlace
from fulgurite.backends.csx.state.storage import OptimizerEntry as OptimizerEntry
from fulgurite.backends.csx.state.storage import Place as Place
from fulgurite.backends.csx.state.storage import SideEffects as SideEffects
from fulgurite.backends.csx.state.storage import StateInput as StateInput
from fulgurite.backends.csx.state.storage import StateTensor as StateTensor
from fulgurite.backends.csx.state.storage import brief as brief
from fulgurite.backends.csx.state.storage import copying_remedy as copying_remedy
from fulgurite.backends.csx.state.storage import dict_of as dict_of
from fulgurite.backends.csx.state.storage import dotted_name as dotted_name
from fulgurite.backends.csx.state.storage import dtype_and_shape as dtype_and_shape
from fulgurite.backends.csx.state.storage import entry_name as entry_name
from fulgurite.backends.csx.state.storage import module_places as module_places
from fulgurite.backends.csx.state.storage import optimizer_places as optimizer_places
from fulgurite.backends.csx.state.storage import own_attributes as own_attributes
from fulgurite.backends.csx.state.storage import parameter_replaced as parameter_replaced
from fulgurite.backends.csx.state.storage import state_inputs as state_inputs
