"""Anybody's evaluation results: read from the files of several tools, and compared as our own."""
