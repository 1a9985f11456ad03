"""Jobs: a durable ledger, workers that carry it out, and what kinds of jobs there are."""
