"""Signatures: as the standard has them, and what a receiver refuses."""

from __future__ import annotations

import base64

import pytest

from dcp.server.webhooks.signing import SignatureError, check_secret, headers_for, new_secret, verify

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE = "msg_p5jXN8AQM9LWM0D4loKWxJek"
BODY = b'{"test": 2432232314}'
SENT = 1614265330.0


def test_the_example_of_the_standard_comes_out() -> None:
    """The identifier, time, body and secret of Standard Webhooks' own example give its signature."""
    assert headers_for([SECRET], MESSAGE, SENT, BODY) == {
        "webhook-id": MESSAGE,
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_new_secrets_differ_and_sign() -> None:
    """32 random bytes each, in the form that receivers' libraries take."""
    secrets = {new_secret() for _ in range(20)}
    assert len(secrets) == 20
    for secret in secrets:
        check_secret(secret)
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
        assert verify([secret], headers_for([secret], "evt_1", SENT, BODY), BODY, SENT + 299) == "evt_1"


@pytest.mark.parametrize(
    "secret", ["", "abc", "whsec_", "whsec_%%%%", "whsec_" + "A" * 20, "whsec_" + "A" * 120]
)
def test_weak_and_malformed_secrets_are_refused(secret: str) -> None:
    """Without the prefix, not base64, fewer than 24 bytes or more than 64."""
    with pytest.raises(ValueError):
        check_secret(secret)


def test_while_a_secret_is_rotated_both_verify() -> None:
    """A receiver that has the old one, the new one or both takes the delivery; one with another does not."""
    old, new = new_secret(), new_secret()
    headers = headers_for([new, old], "evt_1", SENT, BODY)
    for known in ([old], [new], [new_secret(), old]):
        assert verify(known, headers, BODY, SENT) == "evt_1"
    with pytest.raises(SignatureError, match="matches"):
        verify([new_secret()], headers, BODY, SENT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook-id", "evt_2"),
        ("webhook-timestamp", "1614265331"),
        ("webhook-timestamp", "now"),
        ("webhook-signature", ""),
        ("webhook-signature", "v1,AAAA"),
        ("webhook-signature", "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        ("webhook-signature", "é"),
    ],
)
def test_changed_headers_are_refused(name: str, value: str) -> None:
    """Identifier and time are signed as the body is."""
    headers = headers_for([SECRET], MESSAGE, SENT, BODY) | {name: value}
    with pytest.raises(SignatureError):
        verify([SECRET], headers, BODY, SENT)


def test_changed_bodies_missing_headers_and_old_deliveries_are_refused() -> None:
    """One bit, one header, more than five minutes in either direction."""
    headers = headers_for([SECRET], MESSAGE, SENT, BODY)
    with pytest.raises(SignatureError):
        verify([SECRET], headers, BODY + b" ", SENT)
    for late in (301.0, -301.0):
        with pytest.raises(SignatureError, match="ago"):
            verify([SECRET], headers, BODY, SENT + late)
    for name in headers:
        with pytest.raises(SignatureError):
            verify([SECRET], {key: value for key, value in headers.items() if key != name}, BODY, SENT)
