"""Starts ranks, and waits for them."""
