"""Stock torch's `.metadata`, read and written without torch.

Files of `torch.save` are one folder up.
"""
