"""Compiled programs on disk.

cache         compiled programs in a folder; fingerprint: the key of each
entries       one of them, sealed
cache_folder  where they lie
measured      what this machine took before
upkeep        their names and locks, and which of them are removed
"""
