"""What is over goes."""
