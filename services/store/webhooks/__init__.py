"""Who hears of the end of a batch, and for how long it is tried."""
