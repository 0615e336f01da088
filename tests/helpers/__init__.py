"""What the tests share: tiny models, the independent meter, counters."""
