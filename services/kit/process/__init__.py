"""What every process of ours has: settings, logs, metrics, loops, readiness, places to die at."""
