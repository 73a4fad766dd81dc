"""Callers that mean harm, and a client that must not notice them."""
