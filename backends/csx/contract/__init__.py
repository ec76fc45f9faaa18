"""What a user's code may do in a step, what it sees there, and what it is told of a misuse.

``capture`` and the rooms above it import all that runs while a step is traced; this room imports
``hyperparams``, ``state``, ``graph`` and ``diagnostics``.

observers          all that looks at a step's code, put together
rules              the table of rules: each misuse, its error, text and remedy
refusals           which rule a call broke: who called it, and with what
function_mode      stands in front of every torch call of the step
overrides          static forms of torch functions that look at values, and of indexing
dtype_rules        one 16-bit type a run, and the default dtype that a trace began with
leaks              what tensors are called, and those that are kept where no step fills them
watched            which numbers, strings and objects of the batch a step reads
frozen_reads       Python values that the program keeps: counters, clocks, random numbers
frozen_values      scalars in attributes and buffers that the host may not change
attributes         what the step reads and writes in attributes of modules
constants          tensors that keep their value while tracing
"""

from fulgurite.backends.csx.contract.attributes import code_of_zeros as code_of_zeros
from fulgurite.backends.csx.contract.attributes import may_collect as may_collect
from fulgurite.backends.csx.contract.constants import Source as Source
from fulgurite.backends.csx.contract.constants import constant_sources as constant_sources
from fulgurite.backends.csx.contract.constants import constants_as_inputs as constants_as_inputs
from fulgurite.backends.csx.contract.frozen_reads import PLAIN as PLAIN
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning as FrozenValueWarning
from fulgurite.backends.csx.contract.frozen_reads import Reads as Reads
from fulgurite.backends.csx.contract.frozen_reads import forget_shown as forget_shown
from fulgurite.backends.csx.contract.frozen_reads import (
    frozen_hook_arguments as frozen_hook_arguments,
)
from fulgurite.backends.csx.contract.frozen_reads import frozen_index as frozen_index
from fulgurite.backends.csx.contract.frozen_reads import impure_functions as impure_functions
from fulgurite.backends.csx.contract.frozen_reads import reads_of_lightning as reads_of_lightning
from fulgurite.backends.csx.contract.frozen_reads import told_again as told_again
from fulgurite.backends.csx.contract.frozen_reads import warn as warn
from fulgurite.backends.csx.contract.frozen_reads import warn_of_audit as warn_of_audit
from fulgurite.backends.csx.contract.frozen_reads import (
    warn_of_frozen_reads as warn_of_frozen_reads,
)
from fulgurite.backends.csx.contract.frozen_reads import warned_in as warned_in
from fulgurite.backends.csx.contract.frozen_values import Access as Access
from fulgurite.backends.csx.contract.frozen_values import FrozenScalars as FrozenScalars
from fulgurite.backends.csx.contract.frozen_values import is_scalar as is_scalar
from fulgurite.backends.csx.contract.function_mode import Contract as Contract
from fulgurite.backends.csx.contract.leaks import Leaked as Leaked
from fulgurite.backends.csx.contract.leaks import tell_of_leaks as tell_of_leaks
from fulgurite.backends.csx.contract.leaks import valueless as valueless
from fulgurite.backends.csx.contract.observers import Observers as Observers
from fulgurite.backends.csx.contract.refusals import explained as explained
from fulgurite.backends.csx.contract.refusals import refused_calls as refused_calls
from fulgurite.backends.csx.contract.rules import METRIC as METRIC
from fulgurite.backends.csx.contract.watched import EPOCH as EPOCH
from fulgurite.backends.csx.contract.watched import INDEX as INDEX
from fulgurite.backends.csx.contract.watched import USES as USES
from fulgurite.backends.csx.contract.watched import PassedOn as PassedOn
from fulgurite.backends.csx.contract.watched import holds_traced as holds_traced
from fulgurite.backends.csx.contract.watched import is_watched as is_watched
from fulgurite.backends.csx.contract.watched import source_of as source_of
from fulgurite.backends.csx.contract.watched import unwatched as unwatched
from fulgurite.backends.csx.contract.watched import values_where_refused as values_where_refused
from fulgurite.backends.csx.contract.watched import watch as watch
from fulgurite.backends.csx.contract.watched import watch_container as watch_container
from fulgurite.backends.csx.contract.watched import watch_object as watch_object
