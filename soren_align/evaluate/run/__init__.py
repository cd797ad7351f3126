"""From a model and a suite to responses and scores."""
