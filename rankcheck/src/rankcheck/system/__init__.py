"""What the system knows about processes; safe reading of files."""
