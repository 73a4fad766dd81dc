"""The serving service: HTTP, the engine, and per-client state in Redis."""
