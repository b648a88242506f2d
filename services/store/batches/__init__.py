"""A batch from its creation until it runs, and why it waits."""
