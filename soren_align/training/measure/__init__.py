"""Measurements during training: updates and curves, samples, retention."""
