"""Immutable blobs: contents of files, line indexes, large segments."""
