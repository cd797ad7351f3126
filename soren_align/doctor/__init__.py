"""Whether this machine is fit to train with soren-align: checks in processes of their own, one line
for each.
"""
