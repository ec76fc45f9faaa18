"""Checks values against types, and finds the classes that a file names.

``schema`` and ``run`` may import from any file here; these import ``document``.

sources             classes and functions of libraries, and what those take, by their source
categories          the kinds of class that a file names: optimizers, callbacks, ...
loggers             which loggers are there by default
signatures          the parameters of a class or function, and their types taken apart
makes               what a class or function makes, looked at before it is called
classes             which class a name or an import path in a file stands for, or why none
report              what a check makes of a file: problems, notes, and calls in place of objects
values              a value or arguments against their types; the rest by jsonargparse
constructor_checks  ranges of values: the errors that constructors of libraries raise
shapes              the few kinds of value that a file is made of: a mapping, a class, a list
"""
