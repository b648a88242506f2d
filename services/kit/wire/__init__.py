"""What travels between services: ids, errors, frames, result lines, endpoints, limits."""
