"""The meters, one for each way in which memory can be seen."""
