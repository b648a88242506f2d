"""The scheduler: keeps the window, cuts chunks just in time, publishes and reconciles them."""
