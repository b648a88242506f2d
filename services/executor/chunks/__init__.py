"""A chunk from the bus until it is done."""
