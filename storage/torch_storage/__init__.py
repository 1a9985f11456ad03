"""torch's storage interfaces, readers and writers, over stores, formats and the engine.

What is read or written for which rank is a plan's, in `dcp.planners`; how, is said in `dcp.storage.engine`.
"""
