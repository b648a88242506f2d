"""An engine with made-up answers, for tests and for trying a client."""
