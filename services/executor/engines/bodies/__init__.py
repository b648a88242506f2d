"""What a request body may hold, for every engine: fields, bounds."""
