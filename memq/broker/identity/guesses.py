"""Slows guesses of passwords, without locking a user out. Pure, with bounded memory.

A user at an address, and an address, have a budget of failed logins: over it, the broker refuses to try. A user at all
addresses together has one, too: over it, logins from addresses at which it has not logged in are delayed only.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from memq.errors import ThrottledError

KEYS_MAX = 4_096  # of each budget, and addresses at which users have logged in
OF_USER_AT_ADDRESS = 5, 5.0  # failures at once, then seconds for each
OF_ADDRESS = 50, 0.5  # of all users there
OF_USER = 100, 1.0  # at all addresses
DELAY_S = 2.0  # below the clients' time-out for a connection
_IPV6_PREFIX = 64  # an address of this length is one customer of a provider


class _Budget:
    """Failures by key: `burst` at once, then one each `interval_s`."""

    def __init__(self, burst: int, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lent_s = (burst - 1) * interval_s
        self._paid_s: OrderedDict[str, float] = OrderedDict()  # when all are forgotten, by the last failure

    def __len__(self) -> int:
        return len(self._paid_s)

    def wait_s(self, key: str, now_s: float) -> float:
        """Return the time until the next failure is allowed; 0 if it is."""
        return max(0.0, self._paid_s.get(key, 0.0) - now_s - self._lent_s)

    def take(self, key: str, now_s: float) -> None:
        """Note a failure."""
        self._paid_s[key] = max(now_s, self._paid_s.get(key, 0.0)) + self._interval_s
        self._paid_s.move_to_end(key)
        if len(self._paid_s) > KEYS_MAX:
            self._paid_s.popitem(last=False)


class Guesses:
    """Failed and successful logins of the last time."""

    def __init__(self) -> None:
        self._of_user_at_address = _Budget(*OF_USER_AT_ADDRESS)
        self._of_address = _Budget(*OF_ADDRESS)
        self._of_user = _Budget(*OF_USER)
        self._successes: OrderedDict[str, None] = OrderedDict()

    @property
    def remembered(self) -> int:
        """Users and addresses in memory."""
        budgets = self._of_user_at_address, self._of_address, self._of_user
        return sum(len(each) for each in budgets) + len(self._successes)

    def check(self, user: str, host: str, now_s: float) -> None:
        """Raise ThrottledError if a password may not be tried now."""
        address = _address_of(host)
        pair = _pair(user, address)
        wait_s = self._of_user_at_address.wait_s(pair, now_s)
        if pair not in self._successes:
            wait_s = max(wait_s, self._of_address.wait_s(address, now_s))
        if wait_s:
            raise ThrottledError(
                f"too many logins failed at address {address}",
                hint="check user and password; memq tries again by itself",
                retry_after_ms=int(wait_s * 1_000) + 1,
            )

    def delay_s(self, user: str, host: str, now_s: float) -> float:
        """Return the time that the broker waits before it answers a login."""
        known = _pair(user, _address_of(host)) in self._successes
        return 0.0 if known or not self._of_user.wait_s(user, now_s) else DELAY_S

    def failed(self, user: str, host: str, now_s: float) -> None:
        """Note a wrong password, or one of an unknown user."""
        address = _address_of(host)
        self._of_user_at_address.take(_pair(user, address), now_s)
        self._of_address.take(address, now_s)
        self._of_user.take(user, now_s)

    def passed(self, user: str, host: str) -> None:
        """Note a right password."""
        pair = _pair(user, _address_of(host))
        self._successes[pair] = None
        self._successes.move_to_end(pair)
        if len(self._successes) > KEYS_MAX:
            self._successes.popitem(last=False)


def _address_of(host: str) -> str:
    """Return the address that counts: of IPv6 the network of a customer."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))


def _pair(user: str, address: str) -> str:
    return f"{address} {user}"
