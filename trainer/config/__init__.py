"""Parameter files: a run written down as YAML.

    trainer, module, data = fulgurite.load("digits.yaml")
    fulgurite.run_config("digits.yaml", "fit")

In reading order:

problems          what is wrong with a file: every mistake at once, each with its line and key
nodes             YAML, read safely, with the place of every key
reading           files and dicts as documents; overrides; ${NAME} of the environment
sections          what the keys of ``loop``, ``logging`` and ``autorestart`` mean, as typed classes
categories        the kinds of class that a file names
classes           which class a name in a file stands for
report            what a check found so far
signatures        what a class or function takes, by jsonargparse
values            a value against a type: classes at any depth; the rest by jsonargparse
calls             objects to be made when the file is built
arguments         a class's arguments: their names, and all that is wrong with them
trials            ranges of values: what libraries' classes say when they are made on the side
shapes            what may stand where: the few kinds of value that a file is made of
optimizers        ``optimizer``: its arguments, and param groups by globs
schedulers        ``schedulers``: their arguments, and when they are stepped
data              loaders of a file, and all of them as a LightningDataModule
loggers           which loggers are there by default
conflicts         keys that say the same thing twice, or contradict each other
schema            the file itself, as tables of shapes
json_schema       the same for editors
known             keys that files have and that mean nothing here, with a note each
legacy_table      the keys of old files, and where each one's value goes
legacy_draft      a new file in the making, with the old key of each value
legacy_schedules  old schedules as schedulers
legacy_optimizer  old optimizers
legacy            the old form of files, turned into this one
written           a file as YAML text
checking          a file against the tables: a plan, or all its mistakes; nothing is built
refusing          what a checked file cannot be run with
modules           a plain nn.Module as a LightningModule; the file's optimizer for it
validating        ``eval_frequency``: validation after so many steps
resolved          a checked file with overrides and defaults in; kept with each training
building          from a plan to Trainer, module and data
running           fit, validate, validate_all, test, predict
"""

from __future__ import annotations
