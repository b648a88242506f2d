"""Blobs in a bucket."""
