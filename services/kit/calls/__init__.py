"""Calls between services: servers, channels, policies, peers behind an address."""
