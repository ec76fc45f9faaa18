"""Says what may be in a parameter file, key by key, and checks a file against it.

``run``, the CLI and the runners may import from any file here; these import ``document``,
``types`` and ``legacy``. A new key: a field of a class in ``sections``, or a row of ``INIT`` and a
field of ``Init`` in ``schema``; what it does is in ``run/loading``. If a Trainer argument says the
same, it gets a row of ``SAME`` in ``conflicts``.

sections      the keys of ``loop``, ``logging`` and ``autorestart``, as dataclasses
class_shapes  schedulers, loggers and loaders: classes that take more than their own arguments
optimizers    ``optimizer``: its arguments, and param groups by globs
conflicts     keys that say the same thing twice, or contradict each other
schema        the file itself, as tables of shapes, and ``trainer.init`` as one typed object
json_schema   the same for editors
checking      a file against the tables: a plan, or all its mistakes; nothing is built

But for ``json_schema`` nothing here imports torch, Lightning or a part of Fulgurite that does:
``Classes.library`` does, or reads its source. So ``fulgurite check --no-imports`` answers at once.
"""
