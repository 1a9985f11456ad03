"""Imported by the fork server alone, after all else that its processes need."""

from tests.support.warm_writers import fork_off

fork_off()
