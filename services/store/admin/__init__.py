"""Projects, keys, quotas, usage, models: what an operator sets."""
