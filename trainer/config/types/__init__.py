"""Values against types: which class a name stands for, and what it takes.

categories   the kinds of class that a file names
loggers      which loggers are there by default
classes      which class a name in a file stands for
report       what a check found so far
signatures   what a class or function takes, by jsonargparse
annotations  a type annotation taken apart, and its name in errors
values       a value against a type: classes at any depth; the rest by jsonargparse
calls        objects to be made when the file is built
constructor_checks   ranges of values: what constructors of libraries' classes raise
shapes       what may stand where: the few kinds of value that a file is made of
"""
