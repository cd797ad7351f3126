"""Evaluation results of lm-eval, and tables: read, and compared as our own."""
