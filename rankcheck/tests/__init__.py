"""rankcheck's own tests: `pytest` in the folder above.

They are a package, so that a suite that runs them beside other tests can tell
their conftest.py and its own apart.
"""
