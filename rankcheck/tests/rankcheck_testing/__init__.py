"""What the tests of rankcheck share with those of a project that uses it."""
