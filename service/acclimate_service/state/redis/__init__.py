"""Redis: connections, keys, scripts, checks, and a private server where none is given."""
