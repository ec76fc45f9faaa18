"""The errors and the warning about steps that are not static (``docs/errors.md`` shows each), and
those about parameter files and checkpoints.
"""

from fulgurite.backends.checkpoints.damage import CheckpointError as CheckpointError
from fulgurite.backends.csx.compile.checking.selfcheck import (
    MiscompiledWarning as MiscompiledWarning,
)
from fulgurite.backends.csx.contract import FrozenValueNote as FrozenValueNote
from fulgurite.backends.csx.contract import FrozenValueWarning as FrozenValueWarning
from fulgurite.backends.csx.diagnostics.trace_errors import BatchesDiffer as BatchesDiffer
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor as ConditionalOnTensor,
)
from fulgurite.backends.csx.diagnostics.trace_errors import DynamicShape as DynamicShape
from fulgurite.backends.csx.diagnostics.trace_errors import ForeignState as ForeignState
from fulgurite.backends.csx.diagnostics.trace_errors import FrozenNumber as FrozenNumber
from fulgurite.backends.csx.diagnostics.trace_errors import FrozenValueChanged as FrozenValueChanged
from fulgurite.backends.csx.diagnostics.trace_errors import GradientNotKept as GradientNotKept
from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged as GraphChanged
from fulgurite.backends.csx.diagnostics.trace_errors import GraphsDiffer as GraphsDiffer
from fulgurite.backends.csx.diagnostics.trace_errors import HostRead as HostRead
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged as InputChanged
from fulgurite.backends.csx.diagnostics.trace_errors import LeakedTensor as LeakedTensor
from fulgurite.backends.csx.diagnostics.trace_errors import NoLoss as NoLoss
from fulgurite.backends.csx.diagnostics.trace_errors import NoMeeting as NoMeeting
from fulgurite.backends.csx.diagnostics.trace_errors import OtherRankEnded as OtherRankEnded
from fulgurite.backends.csx.diagnostics.trace_errors import RandomStateSet as RandomStateSet
from fulgurite.backends.csx.diagnostics.trace_errors import ScalarArgument as ScalarArgument
from fulgurite.backends.csx.diagnostics.trace_errors import StateBornInStep as StateBornInStep
from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged as StateChanged
from fulgurite.backends.csx.diagnostics.trace_errors import TensorPrinted as TensorPrinted
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError as TraceError
from fulgurite.backends.csx.diagnostics.trace_errors import UnfusedLoss as UnfusedLoss
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDevice as UnsupportedDevice
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDtype as UnsupportedDtype
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedInput as UnsupportedInput
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState as UnsupportedState
from fulgurite.backends.safe_load import UnsafeCheckpoint as UnsafeCheckpoint
from fulgurite.backends.supported import UnsupportedVersion as UnsupportedVersion
from fulgurite.config.document.problems import ParameterFileError as ParameterFileError
