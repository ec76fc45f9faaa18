"""Commands that are about the machine and what was built, and not about a parameter file.

options     their command lines; imports nothing else
versions    ``fulgurite --version``: what a report of a bug needs, without an import of torch
cache       ``fulgurite cache``: what is compiled already, and removing it
compiling   ``fulgurite compile``: a script whose programs are compiled, and which trains nothing
doctor      ``fulgurite doctor``: what there is, what is wrong with it, what to do
checkups    what the doctor looks at, one function each
processes   the same of processes that train together: where they meet, if they can
report      ``fulgurite report`` and ``fulgurite diff``: what was built, and what a change did to it
self_test   a small training, eager and compiled, side by side
"""
