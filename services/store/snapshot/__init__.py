"""A consistent copy of all rows."""
