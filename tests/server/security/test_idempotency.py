"""Tests of answers kept for a repeated request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp.server.database.engine import Database
from dcp.server.http import kept_answers
from dcp.server.http.kept_answers import (
    KeptAnswer,
    Reservation,
    begin,
    finish,
    forget,
    forget_old,
    hash_of,
    keep,
)
from dcp.server.problems import ConflictError, UnprocessableError

pytestmark = pytest.mark.each_database  # their SQL differs

NOW = 1_700_000_000.0
ONE = hash_of("POST", "/a", b"", b"{}")
TWO = hash_of("POST", "/a", b"", b"{ }")


def test_hashes_tell_requests_apart() -> None:
    """Each part counts, and where one ends and the next begins."""
    requests = [
        ("POST", "/a", b"", b"x"),
        ("POST", "/a", b"x", b""),
        ("POST", "/ax", b"", b""),
        ("POST", "/a", b"", b""),
        ("PUT", "/a", b"", b""),
    ]
    assert len({hash_of(*request) for request in requests}) == len(requests)


def test_the_first_answer_is_given_again(database: Database) -> None:
    """To its caller, for the same request, for a day."""
    answer = KeptAnswer(201, {"location": "/a/1"}, b'{"id": 1}')
    assert begin(database, "a", "key", ONE, NOW) is None
    with pytest.raises(ConflictError) as working:
        begin(database, "a", "key", ONE, NOW + 1)
    assert (working.value.extra["state"], working.value.headers["Retry-After"]) == ("working", "1")
    finish(database, Reservation("a", "key", NOW), answer)
    assert begin(database, "a", "key", ONE, NOW + 2) == answer
    with pytest.raises(UnprocessableError):
        begin(database, "a", "key", TWO, NOW + 2)
    assert begin(database, "b", "key", TWO, NOW + 2) is None
    assert begin(database, "a", "key", TWO, NOW + kept_answers.KEPT_SECONDS + 1) is None


def test_a_request_that_never_ended(database: Database) -> None:
    """Its process may be dead: after a while the next is taken for it. What failed is free at once."""
    assert begin(database, "a", "key", ONE, NOW, taken_seconds=100) is None
    with pytest.raises(ConflictError):
        begin(database, "a", "key", ONE, NOW + 99, taken_seconds=100)
    assert begin(database, "a", "key", ONE, NOW + 101, taken_seconds=100) is None
    forget(database, Reservation("a", "key", NOW + 101))
    assert begin(database, "a", "key", TWO, NOW + 102, taken_seconds=100) is None
    finish(database, Reservation("a", "key", NOW + 102), KeptAnswer(200, {}, b""))
    forget(database, Reservation("a", "key", NOW + 102))  # not what has been answered
    assert begin(database, "a", "key", TWO, NOW + 103) is not None


def test_who_was_overtaken_does_nothing(database: Database) -> None:
    """A request that is slower than another one is patient neither keeps an answer nor frees the key."""
    begin(database, "a", "key", ONE, NOW, taken_seconds=100)
    slow, quick = (Reservation("a", "key", since) for since in (NOW, NOW + 101))
    assert begin(database, "a", "key", ONE, quick.since_seconds, taken_seconds=100) is None
    forget(database, slow)
    finish(database, slow, KeptAnswer(200, {}, b"slow"))
    with pytest.raises(ConflictError), database.write() as connection:
        keep(connection, slow, KeptAnswer(200, {}, b"slow"))
    with pytest.raises(ConflictError):
        begin(database, "a", "key", ONE, NOW + 102, taken_seconds=100)
    with database.write() as connection:
        keep(connection, quick, KeptAnswer(201, {}, b"quick"))
    assert begin(database, "a", "key", ONE, NOW + 103) == KeptAnswer(201, {}, b"quick")


def test_of_many_at_once_one_is_first(database: Database) -> None:
    """The others are told that it is being worked on."""

    def try_it(_number: int) -> str:
        try:
            return "first" if begin(database, "a", "key", ONE, NOW) is None else "again"
        except ConflictError:
            return "working"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(try_it, range(12)))
    assert sorted(results) == ["first"] + ["working"] * 11


def test_old_ones_are_forgotten(database: Database) -> None:
    """After a day, and not before."""
    begin(database, "a", "old", ONE, NOW)
    finish(database, Reservation("a", "old", NOW), KeptAnswer(200, {}, b"x"))
    begin(database, "a", "new", ONE, NOW + 10)
    finish(database, Reservation("a", "new", NOW + 10), KeptAnswer(200, {}, b"x"))
    forget_old(database, NOW + kept_answers.KEPT_SECONDS + 5)
    later = NOW + kept_answers.KEPT_SECONDS + 6
    assert begin(database, "a", "new", ONE, later) is not None
    assert begin(database, "a", "old", TWO, later) is None
