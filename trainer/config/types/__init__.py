"""Checks values against types, and finds the classes that a file names.

``schema`` and ``run`` may import from any file here; these import ``document``.

sources             classes and functions of libraries by their source, without importing them
source_signatures   what those take
categories          the kinds of class that a file names: optimizers, callbacks, ...
loggers             which loggers are there by default
makes               what a class or function makes, looked at before it is called
importing           import paths: what they stand for, or why they stand for nothing
classes             which class a name in a file stands for
report              the problems and notes of a check
signatures          the parameters of a class or function, by jsonargparse
annotations         a type annotation taken apart, and its name in errors
calls               objects to be made when the file is built
named_code          paths of code where no class is asked for
values              a value or arguments against their types; the rest by jsonargparse
constructor_checks  ranges of values: the errors that constructors of libraries raise
shapes              the few kinds of value that a file is made of: a mapping, a class, a list
"""
