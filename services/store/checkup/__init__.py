"""What `doctor` looks at, read-only: the rows of the database and the files that they name."""
