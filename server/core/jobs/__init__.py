"""Jobs: workers that carry them out, schedules, and who follows what happens to one.

The durable record of them is `ledger`, where their steps run `executors`; their kinds are features'.
"""
