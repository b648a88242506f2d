"""One script for each budget of the design. `python -m benchmarks` runs all, prints one table."""
