"""Starts, watches and judges anybody's training script."""
