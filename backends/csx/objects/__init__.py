"""The Python objects around a step: which tensors they hold, and what a step did to them.

``capture`` and the rooms above it import from here; this room imports from ``contract``,
``state`` and ``diagnostics`` alone.

batch_spec     what batches must look like, in which sizes they vary, what steps change in them
batch_objects  batches that are objects
leaves         tensors inside lists, dicts and objects
trees          what the step did to these
discovery      what a function works on: found along the names in its code
python_state   what a second trace changes, compared and put back
readable       what the host may have changed that the step can read
"""

from fulgurite.backends.csx.objects.batch_objects import BatchObjects as BatchObjects
from fulgurite.backends.csx.objects.batch_objects import keystr as keystr
from fulgurite.backends.csx.objects.batch_objects import (
    pass_through_values as pass_through_values,
)
from fulgurite.backends.csx.objects.batch_spec import CONSTANTS as CONSTANTS
from fulgurite.backends.csx.objects.batch_spec import SHAPES as SHAPES
from fulgurite.backends.csx.objects.batch_spec import BatchChanges as BatchChanges
from fulgurite.backends.csx.objects.batch_spec import BatchSpec as BatchSpec
from fulgurite.backends.csx.objects.batch_spec import Leaf as Leaf
from fulgurite.backends.csx.objects.batch_spec import Path as Path
from fulgurite.backends.csx.objects.batch_spec import Shapes as Shapes
from fulgurite.backends.csx.objects.batch_spec import VaryingDimension as VaryingDimension
from fulgurite.backends.csx.objects.batch_spec import copy_containers as copy_containers
from fulgurite.backends.csx.objects.batch_spec import shapes_of as shapes_of
from fulgurite.backends.csx.objects.batch_spec import told_of_shapes as told_of_shapes
from fulgurite.backends.csx.objects.batch_spec import too_many_shapes as too_many_shapes
from fulgurite.backends.csx.objects.batch_spec import varying_dimensions as varying_dimensions
from fulgurite.backends.csx.objects.batch_spec import without_added_keys as without_added_keys
from fulgurite.backends.csx.objects.discovery import Discovery as Discovery
from fulgurite.backends.csx.objects.discovery import attributes_read as attributes_read
from fulgurite.backends.csx.objects.discovery import codes_reached as codes_reached
from fulgurite.backends.csx.objects.discovery import discover as discover
from fulgurite.backends.csx.objects.leaves import AttributeTree as AttributeTree
from fulgurite.backends.csx.objects.leaves import Trees as Trees
from fulgurite.backends.csx.objects.leaves import holders_in as holders_in
from fulgurite.backends.csx.objects.leaves import lies_in as lies_in
from fulgurite.backends.csx.objects.python_state import Change as Change
from fulgurite.backends.csx.objects.python_state import PythonState as PythonState
from fulgurite.backends.csx.objects.readable import ReadableState as ReadableState
from fulgurite.backends.csx.objects.trees import AppendedList as AppendedList
from fulgurite.backends.csx.objects.trees import ConstantTables as ConstantTables
from fulgurite.backends.csx.objects.trees import RebuiltList as RebuiltList
from fulgurite.backends.csx.objects.trees import SharedTensorSplit as SharedTensorSplit
from fulgurite.backends.csx.objects.trees import TreeChanges as TreeChanges
from fulgurite.backends.csx.objects.trees import check_gradients as check_gradients
from fulgurite.backends.csx.objects.trees import check_ties as check_ties
from fulgurite.backends.csx.objects.trees import order_of as order_of
from fulgurite.backends.csx.objects.trees import place_of_list as place_of_list
