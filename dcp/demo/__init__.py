"""`python -m dcp.demo`: train, kill, resume and reshard a small model, and check every claim on the way.

`story` is the narrator: it starts the other parts as processes of their own and never imports torch.
What does is in `training`: the job, and the reader that knows only torch's own checkpoint module.
"""
