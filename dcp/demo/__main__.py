"""``python -m dcp.demo``."""

from dcp.demo.command import main

if __name__ == "__main__":
    raise SystemExit(main())
