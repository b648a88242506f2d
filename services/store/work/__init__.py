"""Lines go out to executors, results come in."""
