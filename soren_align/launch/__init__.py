"""Run a command in this process, or start the processes that run it."""
