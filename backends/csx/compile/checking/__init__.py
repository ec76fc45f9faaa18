"""Whether compiled code computes what the graph says.

reference     a graph's operations, one by one: what is right
selfcheck     runs of a compiled graph beside its reference; differences: what is compared;
              sensitivity: how far rounding moves a graph's results
trust         what runs the graph meanwhile, and then
failures      a step that fails while it runs: whose line, and why
"""
