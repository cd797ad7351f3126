"""Studies: which optimizer is better on these data, is the difference real, and could this study have seen it?"""
