"""Jobs: ledger, workers, executors, schedules.

`ledger` is the durable record, and `executors` run the phases; features define the kinds.
"""
