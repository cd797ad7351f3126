"""The command line: commands and their options. torch is imported by what they call."""
