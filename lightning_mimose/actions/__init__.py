"""What a unit can do instead of keeping everything, and how that gets onto the model."""
