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

from fulgurite.backends.csx.objects.batch_objects import Objects as Objects
from fulgurite.backends.csx.objects.batch_objects import keystr as keystr
from fulgurite.backends.csx.objects.batch_spec import CONSTANTS as CONSTANTS
from fulgurite.backends.csx.objects.batch_spec import SHAPES as SHAPES
from fulgurite.backends.csx.objects.batch_spec import BatchChanges as BatchChanges
from fulgurite.backends.csx.objects.batch_spec import BatchSpec as BatchSpec
from fulgurite.backends.csx.objects.batch_spec import Leaf as Leaf
from fulgurite.backends.csx.objects.batch_spec import Path as Path
from fulgurite.backends.csx.objects.batch_spec import Shapes as Shapes
from fulgurite.backends.csx.objects.batch_spec import container_at as container_at
from fulgurite.backends.csx.objects.batch_spec import copied as copied
from fulgurite.backends.csx.objects.batch_spec import shapes_of as shapes_of
from fulgurite.backends.csx.objects.batch_spec import too_many as too_many
from fulgurite.backends.csx.objects.batch_spec import varying as varying
from fulgurite.backends.csx.objects.batch_spec import without as without
from fulgurite.backends.csx.objects.discovery import Discovered as Discovered
from fulgurite.backends.csx.objects.discovery import attributes_read as attributes_read
from fulgurite.backends.csx.objects.discovery import codes_reached as codes_reached
from fulgurite.backends.csx.objects.discovery import discover as discover
from fulgurite.backends.csx.objects.leaves import Inside as Inside
from fulgurite.backends.csx.objects.leaves import Trees as Trees
from fulgurite.backends.csx.objects.leaves import holders_in as holders_in
from fulgurite.backends.csx.objects.leaves import lies_in as lies_in
from fulgurite.backends.csx.objects.python_state import Change as Change
from fulgurite.backends.csx.objects.python_state import PythonState as PythonState
from fulgurite.backends.csx.objects.readable import Readable as Readable
from fulgurite.backends.csx.objects.trees import Grown as Grown
from fulgurite.backends.csx.objects.trees import Regrown as Regrown
from fulgurite.backends.csx.objects.trees import TreeChanges as TreeChanges
from fulgurite.backends.csx.objects.trees import Untied as Untied
from fulgurite.backends.csx.objects.trees import check_gradients as check_gradients
from fulgurite.backends.csx.objects.trees import check_ties as check_ties
from fulgurite.backends.csx.objects.trees import order_of as order_of
from fulgurite.backends.csx.objects.trees import where_put as where_put
