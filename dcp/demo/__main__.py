"""Run ``python -m dcp.demo`` as ``dcp demo``."""

import runpy
import sys

sys.argv.insert(1, "demo")
runpy.run_module("dcp", run_name="__main__")
