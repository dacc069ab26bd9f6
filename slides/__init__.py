"""The lecture: decks of slides, from the same sources as the lessons."""
