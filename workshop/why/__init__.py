"""Why a job hangs, dies or crawls: python -m workshop why."""
