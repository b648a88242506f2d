"""What several commands use: the clients, tables, progress, the data directory."""
