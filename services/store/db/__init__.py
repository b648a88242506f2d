"""The database: one writer, many readers, the clock that decides, and how the two kinds differ."""
