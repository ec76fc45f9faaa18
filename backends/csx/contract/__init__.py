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
proxies            stand-ins for numbers, strings and objects of the batch: who reads them
frozen_reads       Python values that the program keeps: counters, clocks, random numbers
frozen_values      scalars in attributes and buffers that the host may not change
attributes         what the step reads and writes in attributes of modules
constants          tensors that keep their value while tracing
"""

from fulgurite.backends.csx.contract.attributes import Attributes as Attributes
from fulgurite.backends.csx.contract.attributes import code_of_zeros as code_of_zeros
from fulgurite.backends.csx.contract.attributes import may_collect as may_collect
from fulgurite.backends.csx.contract.constants import ConstantSource as ConstantSource
from fulgurite.backends.csx.contract.constants import constant_sources as constant_sources
from fulgurite.backends.csx.contract.constants import constants_as_inputs as constants_as_inputs
from fulgurite.backends.csx.contract.frozen_reads import PLAIN_TYPES as PLAIN_TYPES
from fulgurite.backends.csx.contract.frozen_reads import RANDOM as RANDOM
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueNote as FrozenValueNote
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning as FrozenValueWarning
from fulgurite.backends.csx.contract.frozen_reads import Reads as Reads
from fulgurite.backends.csx.contract.frozen_reads import forget_warned_lines as forget_warned_lines
from fulgurite.backends.csx.contract.frozen_reads import (
    frozen_hook_arguments as frozen_hook_arguments,
)
from fulgurite.backends.csx.contract.frozen_reads import frozen_index as frozen_index
from fulgurite.backends.csx.contract.frozen_reads import frozen_value as frozen_value
from fulgurite.backends.csx.contract.frozen_reads import impure_functions as impure_functions
from fulgurite.backends.csx.contract.frozen_reads import is_replaying as is_replaying
from fulgurite.backends.csx.contract.frozen_reads import note_of_audit as note_of_audit
from fulgurite.backends.csx.contract.frozen_reads import noting as noting
from fulgurite.backends.csx.contract.frozen_reads import reads_of_lightning as reads_of_lightning
from fulgurite.backends.csx.contract.frozen_reads import warn as warn
from fulgurite.backends.csx.contract.frozen_reads import (
    warn_of_frozen_reads as warn_of_frozen_reads,
)
from fulgurite.backends.csx.contract.frozen_reads import warn_of_types as warn_of_types
from fulgurite.backends.csx.contract.frozen_reads import warned_in as warned_in
from fulgurite.backends.csx.contract.frozen_values import Access as Access
from fulgurite.backends.csx.contract.frozen_values import FrozenScalars as FrozenScalars
from fulgurite.backends.csx.contract.frozen_values import HostChange as HostChange
from fulgurite.backends.csx.contract.frozen_values import is_scalar as is_scalar
from fulgurite.backends.csx.contract.function_mode import Contract as Contract
from fulgurite.backends.csx.contract.function_mode import raising_refusals as raising_refusals
from fulgurite.backends.csx.contract.leaks import ValuelessTensor as ValuelessTensor
from fulgurite.backends.csx.contract.leaks import report_leaks as report_leaks
from fulgurite.backends.csx.contract.leaks import valueless as valueless
from fulgurite.backends.csx.contract.observers import Observers as Observers
from fulgurite.backends.csx.contract.proxies import SPECIAL_METHODS as SPECIAL_METHODS
from fulgurite.backends.csx.contract.proxies import PassThrough as PassThrough
from fulgurite.backends.csx.contract.proxies import holds_tensors as holds_tensors
from fulgurite.backends.csx.contract.proxies import holds_traced as holds_traced
from fulgurite.backends.csx.contract.proxies import is_proxy as is_proxy
from fulgurite.backends.csx.contract.proxies import make_container_proxy as make_container_proxy
from fulgurite.backends.csx.contract.proxies import make_object_proxy as make_object_proxy
from fulgurite.backends.csx.contract.proxies import make_proxy as make_proxy
from fulgurite.backends.csx.contract.proxies import operand as operand
from fulgurite.backends.csx.contract.proxies import retry_with_values as retry_with_values
from fulgurite.backends.csx.contract.proxies import source_of as source_of
from fulgurite.backends.csx.contract.proxies import unwrap_proxy as unwrap_proxy
from fulgurite.backends.csx.contract.refusals import explaining_errors as explaining_errors
from fulgurite.backends.csx.contract.refusals import refused_calls as refused_calls
from fulgurite.backends.csx.contract.rules import METRIC_REMEDY as METRIC_REMEDY
from fulgurite.backends.csx.contract.rules import misuse as misuse
