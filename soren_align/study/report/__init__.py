"""The report of a study: one dict of tables and figures, and the pages made of it."""
