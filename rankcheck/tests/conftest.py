"""Isolates the tests: rankcheck_testing/isolation.py."""

pytest_plugins = ["rankcheck_testing.isolation"]
