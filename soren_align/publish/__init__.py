"""A trained model for others: its card, and its upload."""
