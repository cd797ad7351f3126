"""The report of a study: a model of blocks, charts, and the pages made of them."""
