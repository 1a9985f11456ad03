"""What torch writes: stock's `.metadata`, and the zip files of `torch.save`. Imports no torch."""
