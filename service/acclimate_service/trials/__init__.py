"""Challengers beside the champion: adapters that are tried out, compared by labels, and promoted."""
