"""Operations, and passes over them.

Every room but ``diagnostics`` may import from here; this one imports ``diagnostics`` alone.

graph         a traced step: its operations, and what each of its inputs is
op_schema     what is known of an operation without running it: what it writes, whether it draws
recorder      notes the operations of a trace
update        an optimizer's update as one operation
lstm          an LSTM's layer as one operation
collectives   operations in which several processes take part; votes: what these tell each other
passes        pure functions Graph -> Graph
fakes         what results look like, where they lie as kernels have it; those that come again
verify        running a graph again: whether it is sound, after every pass
products      products of matrices, and how many floating-point operations each is
dtypes        narrow floats, wide ones, and cbfloat16, which torch does not have
rng           the random states of a process
"""
