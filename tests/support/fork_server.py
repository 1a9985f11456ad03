"""Modules needed by test processes; imported only by the fork server."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

from tests.support.forking import PRELOADED, end_with_parent

gc.disable()  # the imported objects stay, and repeated scans for garbage take a sixth of the time
for _name in PRELOADED:
    with contextlib.suppress(ImportError):  # a process that needs the module reports the error
        importlib.import_module(_name)

with contextlib.suppress(ImportError):  # environments with only one trainer have no s3fs
    import botocore.session

    # The first S3 client of a process reads megabytes of API descriptions.
    botocore.session.get_session().create_client(
        "s3", "us-east-1", aws_access_key_id="-", aws_secret_access_key="-"
    ).close()

_server = os.getpid()


def _end_with_server() -> None:
    if os.getppid() == _server:
        end_with_parent(signal.SIGKILL)


end_with_parent(signal.SIGKILL)
os.register_at_fork(after_in_child=_end_with_server)
gc.freeze()  # without it the first collection in each process copies every page shared with the others
gc.enable()
