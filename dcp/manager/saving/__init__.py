"""One save of a manager, from the decision to its end: policies, user metadata, in the loop or behind it.

Which steps are saved is agreed in `dcp.manager.coordination`, what follows a commit is in `cleanup`.
"""
