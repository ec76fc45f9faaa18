"""The old form of files, turned into this one.

table        the keys of old files, and where each one's value goes
draft        a new file in the making, with the old key of each value
schedules    old schedules as schedulers
optimizer    old optimizers
converting   a whole file
yaml_text    a file as YAML text, with notes on what changed
"""
