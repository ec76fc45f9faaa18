"""Commands that are about the machine and what was built, and not about a parameter file.

options     their command lines, and the versions; imports nothing else
mistyped    what is said of a command or an option that there is none of
cached      ``fulgurite cache``: what is compiled already, and removing it
programs    ``fulgurite compile``, ``report`` and ``diff``: building programs, looking at them
explain     ``fulgurite explain``: what an error means, and what to write instead
convert_checkpoint  ``fulgurite checkpoint convert``: a checkpoint in parts, and one file
doctor      ``fulgurite doctor``: what there is, what is wrong with it, what to do
self_test   a small training, eager and compiled, side by side
"""
