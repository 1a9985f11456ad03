"""Imported by the fork server alone: all that its processes need."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

from tests.support.forking import PRELOADED, end_with_parent

gc.disable()  # what is imported stays, and to look through it again and again takes a sixth of the time
for _name in PRELOADED:
    with contextlib.suppress(ImportError):  # a process that needs it says what is wrong with it
        importlib.import_module(_name)

with contextlib.suppress(ImportError):  # environments of one trainer have no S3
    import botocore.session

    # What S3 can be asked for is described in megabytes, which the first client of a process reads.
    botocore.session.get_session().create_client(
        "s3", "us-east-1", aws_access_key_id="-", aws_secret_access_key="-"
    ).close()

_server = os.getpid()


def _end_with_server() -> None:
    if os.getppid() == _server:
        end_with_parent(signal.SIGKILL)


end_with_parent(signal.SIGKILL)
os.register_at_fork(after_in_child=_end_with_server)
gc.freeze()  # else the first collection in each process copies every page that it shares with the others
gc.enable()
