"""Imported by the fork server alone, after all else that its processes need."""

import gc

from tests.support.warm_writers import fork_off

gc.collect()
gc.freeze()  # else the first collection in each process copies every page that it shares with the others
fork_off()
