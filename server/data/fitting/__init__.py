"""Whether a checkpoint fills a state: what people have of a state, and what dcp.load would say of it.

No tensor is read, and no code of a model is run here: that is the job `shapes`.
"""
