"""The idioms that work as in stock Lightning, by group, and those that are refused.

base       what an idiom is
gradients  functional  optimization  modules  operations   those that work
refused    those that do not, with the error that comes and what to write instead
"""
