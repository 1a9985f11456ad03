"""Several checkpoints converted to one, which is their sum.

`joined` makes one source of them, `arithmetic` says with which weights they are added, `adapters` what
low-rank adapters add, `terms` what each tensor is a sum of. All else is a conversion's.
"""
