"""Parameter files: a run written down as YAML.

    trainer, module, data = fulgurite.load("digits.yaml")
    fulgurite.run_config("digits.yaml", "fit")

Rooms, from the ground up; a room imports from those above it in this list:

document   a file as a document: plain values, and where each stands
types      values against types, and the classes that a file names
legacy     the old form of files, converted to this one
schema     what may be in a file, key by key
run        from a checked file to a training
"""

from __future__ import annotations
