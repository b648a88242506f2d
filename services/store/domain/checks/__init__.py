"""What a check of the stored rows compares."""
