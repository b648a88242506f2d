"""What other services must hear, from the row to NATS."""
