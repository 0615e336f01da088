"""`lightning-mimose bench`: the same training work under every alternative, interleaved in one run, on one meter.

work -> alternatives -> race (peaks, then times, in turns) -> figures -> table, JSON, plots

Nothing else in the package imports this one; the command does, when it is called.
"""
