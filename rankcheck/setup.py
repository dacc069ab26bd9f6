"""Lets pip build the package in a temporary folder: it leaves nothing here."""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory() as folder:
    # script_name: this file is no module of the package
    setup(script_name="setup.py", options={
        "build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
