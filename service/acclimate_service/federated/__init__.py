"""Federated rounds among live clients."""
