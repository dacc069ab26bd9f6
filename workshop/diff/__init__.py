"""The lessons: what to change, what is left, and making the changes."""
