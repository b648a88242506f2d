"""NATS JetStream: the connection, streams and subjects, pulling work."""
