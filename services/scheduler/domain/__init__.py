"""Decisions of the scheduler: values in, values out."""
