"""One step from batch to record (`core`), and the parts it is made of."""
