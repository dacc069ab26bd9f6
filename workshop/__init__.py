"""What is not taught: the run around a stage, and the tools of the lesson."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
