"""`nightshift up`: all services as one process tree."""
