"""Several trainings in one budget: `SharedBudget`.

What decides (`claim`, `fair`, `bank`, `shares`) is pure: no tensors, no threads, no sockets. The coordinator runs it in
a bare Python process, so these modules, and this file, import nothing but the standard library and each other.
"""
