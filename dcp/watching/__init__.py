"""Following a run: its committed steps, each once for a consumer that has a name.

Who follows and how far is kept by a cursor; which steps there are is known by `dcp.steps.folders`.
"""
