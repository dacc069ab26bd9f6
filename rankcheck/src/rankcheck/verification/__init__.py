"""Check that a training script trains on N processes as on one."""
