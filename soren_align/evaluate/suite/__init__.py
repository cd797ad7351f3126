"""Suites: tasks, their data and settings, and the sandbox that runs no code of theirs."""
