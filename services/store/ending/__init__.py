"""How a batch ends: its open lines, its end files."""
