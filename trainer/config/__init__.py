"""Parameter files: a run written down as YAML.

    trainer, module, data = fulgurite.load("digits.yaml")
    fulgurite.run_config("digits.yaml", "fit")

In reading order:

problems     what is wrong with a file: every mistake at once, each with its line and key
reading      YAML, read safely, with the place of every key; overrides; ${NAME} of the environment
sections     what the keys of ``loop``, ``logging`` and ``autorestart`` mean, as typed classes
classes      which class a name in a file stands for
arguments    a class's arguments against its signature, by jsonargparse
shapes       what may stand where: the few kinds of value that a file is made of
schema       the file itself, as tables of shapes
known        keys that files have and that mean nothing here, with a note each
legacy       the old form of files, turned into this one
checking     a file against the tables: a plan, or all its mistakes; nothing is built
building     from a plan to Trainer, module and data
modules      a plain nn.Module as a LightningModule; the file's optimizer and schedulers
data         loaders of a file as a LightningDataModule
running      fit, validate, validate_all, test, predict
"""

from __future__ import annotations
