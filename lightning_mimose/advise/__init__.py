"""What a step of some size takes, by what was learnt, and which plan it gets."""
