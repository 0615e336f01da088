"""What budgets cost, asked before training: a few small steps teach what the forecast needs."""
