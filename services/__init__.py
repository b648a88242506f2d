"""Nightshift's services and what they share."""

import os

# gRPC's core writes lines of its own to standard error, between ours, which are JSON: of each
# connection that ended oddly, as after a freeze. What matters reaches us as an error. It reads
# this when it is imported, which nothing of ours is before this package.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
