"""Which lines of an input are wrong, and what to change."""
