"""A batch's input, found line by line through its index."""
