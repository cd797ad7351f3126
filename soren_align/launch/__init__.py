"""From a command to the process, or the processes, that run it."""
