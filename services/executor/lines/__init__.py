"""A line through the engine, and its result to the store."""
