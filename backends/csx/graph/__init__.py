"""Operations, and passes over them.

graph         a traced step: its operations, and what each of its inputs is
passes        pure functions Graph -> Graph
dtypes        cbfloat16, a 16-bit type that torch does not have: its facts, and rounding to it
rng           the random states of a process
"""
