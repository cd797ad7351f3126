"""The scripts behind the pages of this folder."""
