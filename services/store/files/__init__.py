"""Files taken in, read and deleted, whole or in parts."""
