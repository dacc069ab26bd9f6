"""What the stage scripts import. Nobody edits it in the course."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
