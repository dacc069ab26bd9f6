"""A SLURM of 1 to 4 nodes on this machine: python -m workshop cluster."""
