"""Which steps are saved, and when to stop: the same on all ranks, whatever each of them saw.

The save itself is begun by `dcp.manager.saving.step_saver`.
"""
