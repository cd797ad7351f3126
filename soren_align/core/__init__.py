"""The common tools of all rooms: errors, files, text for a terminal, documents, and the shipped
folders. No torch.
"""
