"""Data that stores of released schemas left behind, half-way through everything.

`NNNN.json` was written by the code of that schema (see `make`), and is never written again. A test
loads each, migrates it, and lets the batches in it go on.
"""
