"""Why a job hangs, dies or crawls: rankcheck why."""
