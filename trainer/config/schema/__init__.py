"""What may be in a file, key by key.

sections      what the keys of ``loop``, ``logging`` and ``autorestart`` mean, as typed classes
optimizers    ``optimizer``: its arguments, and param groups by globs
schedulers    ``schedulers``: their arguments, and when they are stepped
data          loaders of a file, and all of them as a LightningDataModule
conflicts     keys that say the same thing twice, or contradict each other
init          what ``trainer.init`` says, as one typed object
schema        the file itself, as tables of shapes
json_schema   the same for editors
checking      a file against the tables: a plan, or all its mistakes; nothing is built
"""
