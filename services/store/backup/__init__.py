"""Copies of all that a store keeps, taken while it runs, and put back into either kind of store."""
