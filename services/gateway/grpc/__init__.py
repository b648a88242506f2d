"""The public gRPC door."""
