"""Imported by the fork server alone, after all else that its processes need."""

import contextlib
import gc

from tests.support.forking import end_with_run
from tests.support.programs import use_warm_programs
from tests.support.warm_writers import fork_off

with contextlib.suppress(ImportError):  # environments of one trainer have no S3
    import botocore.session

    from dcp.storage.stores.objects.s3.session import _loader

    # What S3 can be asked for is described in megabytes, which the first client of a process reads.
    _session = botocore.session.get_session()
    _session.register_component("data_loader", _loader(_session.get_config_variable("data_path")))
    _session.create_client("s3", "us-east-1", aws_access_key_id="-", aws_secret_access_key="-").close()
    del _session

gc.collect()
gc.freeze()  # else the first collection in each process copies every page that it shares with the others
use_warm_programs()
end_with_run()
fork_off()
