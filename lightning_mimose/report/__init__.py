"""What the user sees: text, JSON, plots and logged metrics, all from the records' numbers."""
