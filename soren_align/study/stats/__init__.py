"""Statistics of a study: estimates over seeds and questions, power, and the verdict."""
