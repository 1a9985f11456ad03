"""``python -m dcp`` is the command ``dcp``."""

from dcp.cli import main

main()
