"""The doors that know Lightning: callback, strategies, command line, entry point."""
