"""What the system says of processes, and files that may be no files."""
