"""Checks during training that stop it or warn."""
