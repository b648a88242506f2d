"""The line index of an input file, made during its upload."""
