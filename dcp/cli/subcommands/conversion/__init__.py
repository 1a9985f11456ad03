"""The subcommands that make checkpoints of others: ``convert`` and ``merge``, which share their `options`,
and ``map``, which shows the weight maps that a conversion goes by.
"""
