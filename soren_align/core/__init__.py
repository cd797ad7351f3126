"""What every room uses: errors, files, text for a terminal, documents, and the shipped folders.
No torch.
"""
