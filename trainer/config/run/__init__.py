"""Makes Trainer, module and data of a checked file, and runs them.

``fulgurite``, the CLI and the runners import from here; these files may import every other room.

refusing         what a checked file cannot be run with
modules          its model, optimizer and loaders as Lightning's modules
eval_frequency   validation after so many steps
resolved         the file with overrides and defaults in, kept with each training; no secrets in it
loading          from a plan to Trainer, module and data
own_checkpoints  those of a trainer's folder: all, and the newest
attempt          one attempt of a run that is watched, from its own side
restarting       a run in another process that is watched, and started again after a crash
running          fit, validate, validate_all, test, predict
"""
