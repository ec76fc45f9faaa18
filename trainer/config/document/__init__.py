"""Reads a parameter file as a document: plain values, and the line and column of each.

All rooms may import from any file here; these files import nothing above them.

problems   what is wrong with a file: every mistake at once, each with its line and key
nodes      YAML, read safely, with the place of every key
variables  what came from the environment: written and told as ${NAME} again
reading    files and dicts as documents; overrides; ${NAME} of the environment
ignored    keys that files have and that are ignored here, with a note each
"""
