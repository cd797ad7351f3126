"""What a training measures: updates and curves, samples, retention."""
