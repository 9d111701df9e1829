"""Guesses of passwords are slowed, and no stranger locks a user out."""

from __future__ import annotations

import pytest

from memq.broker.identity.guesses import DELAY_S, KEYS_MAX, OF_ADDRESS, OF_USER, OF_USER_AT_ADDRESS, Guesses
from memq.errors import ThrottledError

HOME, OTHER = "10.0.0.1", "10.0.0.2"


def guess(guesses: Guesses, user: str, host: str, now_s: float) -> bool:
    """Try a wrong password; return whether it was tried."""
    try:
        guesses.check(user, host, now_s)
    except ThrottledError:
        return False
    guesses.failed(user, host, now_s)
    return True


def tried(guesses: Guesses, user: str, host: str, seconds: int) -> int:
    """Return how many of ten guesses in each second were tried."""
    return sum(guess(guesses, user, host, second + part / 10) for second in range(seconds) for part in range(10))


def test_guesses_at_one_user_are_slowed_and_the_user_elsewhere_is_not() -> None:
    guesses = Guesses()
    burst, interval_s = OF_USER_AT_ADDRESS
    assert tried(guesses, "ann", HOME, 100) == burst + 100 / interval_s - 1
    guesses.check("ann", OTHER, 100.0)
    guesses.check("bob", HOME, 100.0)
    with pytest.raises(ThrottledError) as caught:
        guesses.check("ann", HOME, 99.0)
    assert 0 < caught.value.retry_after_ms <= interval_s * 1_000 + 1
    guesses.check("ann", HOME, 99.0 + caught.value.retry_after_ms / 1_000)


def test_guesses_at_many_users_from_one_address_are_slowed() -> None:
    guesses = Guesses()
    burst, interval_s = OF_ADDRESS
    guesses.passed("ann", HOME)
    count = sum(guess(guesses, f"user-{number}", HOME, number / 100) for number in range(10_000))
    assert count == pytest.approx(burst + 100 / interval_s, abs=1)
    guess(guesses, "bob", HOME, 100.0)  # the last one that is allowed
    with pytest.raises(ThrottledError):
        guesses.check("bob", HOME, 100.0)
    guesses.check("ann", HOME, 100.0)  # it has logged in there
    guesses.check("bob", OTHER, 100.0)


def test_guesses_from_many_addresses_delay_only_logins_from_new_ones() -> None:
    guesses = Guesses()
    guesses.passed("ann", HOME)
    for number in range(OF_USER[0]):
        assert not guesses.delay_s("ann", OTHER, 0.0)
        assert guess(guesses, "ann", f"10.1.0.{number}", 0.0)
    assert guesses.delay_s("ann", OTHER, 0.0) == DELAY_S
    guesses.check("ann", OTHER, 0.0)
    assert not guesses.delay_s("ann", HOME, 0.0)
    assert not guesses.delay_s("bob", OTHER, 0.0)
    assert not guesses.delay_s("ann", OTHER, OF_USER[1])


def test_addresses_of_one_ipv6_network_and_mapped_ones_count_together() -> None:
    guesses = Guesses()
    burst = OF_USER_AT_ADDRESS[0]
    assert sum(guess(guesses, "ann", f"2001:db8::{number:x}", 0.0) for number in range(1, 99)) == burst
    assert guess(guesses, "ann", "2001:db8:0:1::1", 0.0)
    assert sum(guess(guesses, "ann", host, 0.0) for host in (HOME, f"::ffff:{HOME}") * 10) == burst


def test_strangers_fill_no_memory_and_push_no_success_out() -> None:
    guesses = Guesses()
    guesses.passed("ann", HOME)
    for number in range(3 * KEYS_MAX):
        guess(guesses, f"user-{number}", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", float(number))
    assert guesses.remembered <= 4 * KEYS_MAX
    while guess(guesses, "bob", HOME, 0.0) or guess(guesses, "eve", HOME, 0.0):
        pass
    guesses.check("ann", HOME, 0.0)
