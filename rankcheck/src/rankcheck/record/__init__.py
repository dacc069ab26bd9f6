"""Watches the processes of a script from outside, by probes."""
