"""torch's storage interfaces: readers and writers over stores, formats and the engine.

`dcp.planners` decides the contents for each rank, `dcp.storage.engine` the requests.
"""
