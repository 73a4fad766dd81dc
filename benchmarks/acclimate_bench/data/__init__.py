"""Clients with a known shift: what they are, and how their files are read."""
