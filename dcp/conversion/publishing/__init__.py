"""From finished bytes to a target that exists, and the ledger of what of them is done.

The bytes themselves are written in `dcp.conversion.copying`.
"""
