"""The tools of the course: python -m workshop diff | check | ..."""
