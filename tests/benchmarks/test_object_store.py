from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.resharding import Resharding
from benchmarks.rounds import Measurement
from benchmarks.s3.rows import client_row, object_reshard_row, object_row
from benchmarks.s3.service import Buckets, S3Service
from benchmarks.s3.store import (
    LOAD,
    SAVE,
    ObjectSpec,
    load_resharded_objects,
    measure_objects,
    save_for_resharding_objects,
)
from dcp.demo.s3_server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One whose processor time is that of these tests alone."""
    with S3Server(tmp_path_factory.mktemp("s3-server") / "data") as started:
        yield started


@pytest.fixture
def service(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Service:
    """The server, as the benchmark knows it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return S3Service(server.environment, server.pid)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that contenders use
@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_contenders_save_and_load_on_a_real_server(service: S3Service) -> None:
    """One tiny round: every contender's figures make a row, checkpoints load as saved, no bucket is left."""
    said: list[str] = []
    saving, loading = measure_objects(0, 1, said.append, ObjectSpec("W2", 0.001, 1, service))
    for measured, operation in ((saving, SAVE), (loading, LOAD)):
        row = object_row(measured)
        assert row.operation == operation and row.stock is not None and row.ratio is not None
        pairs = zip(measured.samples["stock"], measured.samples["ours"], strict=True)
        assert row.ratio.median == pytest.approx(statistics.median(stock / ours for stock, ours in pairs))
        assert row.limit_name.startswith("raw_") and row.of_limit is not None and row.of_limit > 0
        assert set(measured.facts["settings"]) >= {"s3fs", "botocore"}
    rounds = [text.partition(":")[0] for text in said if text.startswith("round")]
    assert rounds == [f"round 1/1, {SAVE}", f"round 1/2, {LOAD}", f"round 2/2, {LOAD}"]
    client = service.client()
    assert not [bucket for bucket in client.list_buckets()["Buckets"] if bucket["Name"].startswith("w2-")]
    client.close()


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_resharding_counts_what_was_fetched(service: S3Service) -> None:
    """One rank alone fetches no less than it needs, and each side loads its own checkpoint."""
    buckets = Buckets(service, "reshard")
    kept = {side: buckets.make() for side in ("ours", "stock")}
    save_for_resharding_objects(0, 1, print, 0.001, service, kept)
    result = load_resharded_objects(0, 1, print, ObjectSpec("W1", 0.001, 1, service), 0, kept)
    assert result.bytes_read["ours"] >= result.size_bytes > 0
    assert len(result.samples["ours"]) == len(result.samples["stock"]) == 1
    for bucket in kept.values():
        buckets.remove(bucket)
    buckets.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_whole_workload_on_a_server_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--only s3` from end to end, with all ranks: rows of every kind, and nothing is left behind."""
    work = tmp_path / "work"
    work.mkdir()
    folders = ["--out", str(tmp_path / "out"), "--tmp", str(work)]
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--only", "s3", "--scale", "0.001", "--rounds", "1", *folders]) == 0, capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    document = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    rows = {(row["workload"], row["operation"], row["ranks"]): row for row in document["rows"]}
    assert {("W1", SAVE, 1), ("W1", LOAD, 1), ("W2", SAVE, 1), ("W2", LOAD, 1)} <= rows.keys()
    for ranks in (1, 2, 8):
        assert rows["R1", "load 4 ranks' dim 0 on dim 0 from S3", ranks]["read_per_needed"] >= 1
    assert list(work.iterdir()) == []


def measured(operation: str, **samples: list[float]) -> Measurement:
    """Of W1, one rank, 1 GiB."""
    return Measurement("W1", 1, operation, 1 << 30, 291, samples=samples)


def test_the_fastest_client_is_the_limit() -> None:
    """Nobody gets an easy yardstick, and targets are judged against it and against the other package."""
    samples = {"ours": [1.2, 1.2], "stock": [6.6, 6.6], "s3torchconnector": [1.5, 1.5]}
    samples |= {"raw_get_s3fs": [1.1, 1.1], "raw_get_botocore": [1.0, 1.0], "raw_get_obstore": [1.3, 1.3]}
    row = object_row(measured(LOAD, **samples))
    assert row.limit_name == "raw_get_botocore"
    assert row.of_limit == pytest.approx(1 / 1.2)
    assert row.ratio_peer is not None and row.ratio_peer.median == pytest.approx(1.25)
    assert [verdict.met for verdict in row.verdicts] == [True, True, True]


def test_what_is_not_installed_is_not_judged() -> None:
    """Without the other packages their columns and targets are left out, not failed."""
    only = measured(SAVE, ours=[5.0], stock=[9.0], raw_put_s3fs=[4.5], raw_put_botocore=[4.6])
    row = object_row(only)
    assert row.peer is None and len(row.verdicts) == 2
    assert client_row(only) is None


def test_another_client_is_worth_offering_above_a_bound() -> None:
    """The row says how much faster obstore would be than the better of the two Python clients."""
    samples = {"raw_get_s3fs": [1.4], "raw_get_botocore": [1.5], "raw_get_obstore": [1.0]}
    row = client_row(measured(LOAD, **samples))
    assert row is not None and row.peer_gain == pytest.approx(1.4)
    assert [verdict.met for verdict in row.verdicts] == [False]


def test_bytes_fetched_are_judged_along_the_sharded_dimension_only() -> None:
    """Along the other dimension rows are cut, and blocks that are needed in part are fetched whole."""
    for dim, met in ((0, [False]), (1, [])):
        case = Resharding(2, dim, 1000, {"ours": [1.0], "stock": [3.0]}, {}, {"ours": 1100})
        row = object_reshard_row(case)
        assert row.read_per_needed == pytest.approx(1.1)
        assert [verdict.met for verdict in row.verdicts] == met
