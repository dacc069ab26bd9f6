"""Isolates the tests: rankcheck_testing/isolation.py."""

import sys

ISOLATION = "rankcheck_testing.isolation"
# In a suite that runs these tests beside its own, its conftest.py has named
# the plugin: pytest lets only the first one do so.
if ISOLATION not in sys.modules:
    pytest_plugins = [ISOLATION]
