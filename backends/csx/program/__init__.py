"""Choose a program, build it, run it.

step_function   the step of one stage: which program fits the batch, built where none does, then fed
conditions      what a program was built on besides the batch
executable      an entry point, loaded and bound to its tensors
audit           now and then a step is traced again and compared
summary         a program as plain data
report          what was built, in a line and as files; waiting: what is being built
offline         runs that build programs and do nothing else
"""
