"""A parameter file as a document: what is in it, and where.

problems   what is wrong with a file: every mistake at once, each with its line and key
nodes      YAML, read safely, with the place of every key
reading    files and dicts as documents; overrides; ${NAME} of the environment
ignored    keys that files have and that are ignored here, with a note each
"""
