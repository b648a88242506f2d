"""The other commands, one module a subject."""
