"""The fault bench: what finds silent errors and hangs, side by side."""
