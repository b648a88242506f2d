"""A batch's results and states as a stream."""
