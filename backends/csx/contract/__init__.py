"""What a user's code may do in a step, what it sees there, and what it is told of a misuse.

``capture`` and the rooms above it import all that runs while a step is traced; this room imports
``hyperparams``, ``state``, ``graph`` and ``diagnostics``.

watch              all that looks at a step's code, put together
rules              the table of rules: each misuse, its error, text and remedy; refusals: which of
                   them a call broke; scalar_remedies: what to write where torch takes only numbers
function_mode      stands in front of every torch call of the step; callers: who made it
scalar_arguments   which argument is a tensor where torch takes only Python's numbers
overrides          static forms of torch functions that look at values; indices: of indexing
tensor_names       what tensors are called in messages
dtype_rules        one 16-bit type a run; default_dtype: the one that a trace began with
watched            which numbers, strings and objects of the batch a step reads; proxies: what it
                   sees in place of them
frozen_reads       Python values that the program keeps; impure: clocks and random numbers;
                   replay: the same values when a step is traced again
attributes         what the step reads and writes in attributes of modules; frozen_scalars: the
                   numbers there, which the host may not change; lists: those that it collects
                   results in; changes: which line put something into a module
constants          tensors that keep their value while tracing; fixed_buffers: buffers that Python
                   reads and no step writes
leaks              tensors kept where no step fills them; holders: by whom
"""
