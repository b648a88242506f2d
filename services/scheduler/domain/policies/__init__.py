"""Orders in which the batches of a pool get its capacity, one a file."""
