"""Converts the old form of parameter files to the present one.

``schema``, ``run``, the CLI and the runners import ``converting`` and ``yaml_text``; these files
import ``document``.

old_keys        the keys of old files, and where each one's value goes
draft           the new file while it is made, with the old key of each value
old_optimizers  old optimizers, and old schedules as schedulers
converting      a whole file
yaml_text       a file as YAML text, with notes on what changed
"""
