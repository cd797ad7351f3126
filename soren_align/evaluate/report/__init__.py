"""The results: their file, tables and figure."""
