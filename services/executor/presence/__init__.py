"""What the scheduler hears of this executor."""
