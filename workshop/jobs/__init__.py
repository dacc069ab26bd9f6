"""Jobs, and the machine that they run on."""
