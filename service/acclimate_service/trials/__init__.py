"""Challengers beside the champion: adapters that are tried out, and compared by labels."""
