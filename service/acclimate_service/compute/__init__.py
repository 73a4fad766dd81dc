"""The one thread that runs torch, and what it computes."""
