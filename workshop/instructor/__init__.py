"""The instructor's commands."""
