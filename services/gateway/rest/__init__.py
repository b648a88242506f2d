"""The REST door: HTTP, multipart, downloads, server-sent events, translation to and from gRPC."""
