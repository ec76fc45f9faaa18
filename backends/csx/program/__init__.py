"""Choose a program, build it, run it.

This room makes a callable of what capture found: ``StepFunction`` is what plugins hold; loops and
callbacks ask it for descriptions of its programs. It may import from every room but ``plugins`` and
``distributed``.

step_function   the step of one stage: select a program, build it where none fits, run it
selection       the programs of one stage, and which of them fits a step
guards          what a program relies on, param groups among it: whether it fits, and if not, why
build           entry points are traced, described, loaded and bound
executable      an entry point, loaded and bound to its tensors
first_bad       which operation of a step gave the first result that is not finite
audit           now and then a step is traced again and compared
description     a program as plain data
speed           how long steps take, and whether compiling pays; their rows in the profiler
announcements   what is built, and was, in a line and as files
fit_table       what a fit took, as a table at its end
offline         runs that build programs and do nothing else
"""
