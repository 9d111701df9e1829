"""Groups on state logs: many members, their assignment, and the broker's CPU and memory for them.

Three brokers are one process on parts in memory, with one event loop. The members are another process. They join over
some seconds through any broker. Then each has a connection to the owner of its group, where its heartbeats wait.
"""

from __future__ import annotations

import time

from benchmarks.child import Child
from benchmarks.results import Figure, Options
from memq.limits import KIB

NAME = "groups"
BROKERS, GROUPS, MEMBERS, PARTITIONS = 3, 100, 100, 100
SESSION_MS = 45_000  # the default of Kafka
JOIN_S, WAIT_S = 10.0, 60.0
SETTLE_S_MAX = 5.0
CORE_SHARE_MAX = 0.05
MEMBER_KIB_MAX = 40.0
ONE_BROKER_GROUPS = 20  # of MEMBERS each


def run(options: Options) -> list[Figure]:
    """Measure members over three brokers, then the memory of 2,000 members at one broker."""
    groups = 20 if options.quick else GROUPS
    figures = crowd(options, groups) + memory(options)
    for figure in figures:
        options.say(figure.line())
    return figures


def crowd(options: Options, groups: int) -> list[Figure]:
    """Let all members join, then measure heartbeats alone."""
    stay_s = 20.0 if options.quick else 30.0
    with (
        Child("group_brokers", brokers=BROKERS, partitions=PARTITIONS) as brokers,
        members_of(brokers, groups) as members,
    ):
        began = brokers.ask("cpu")
        joined = members.ask("join", over_s=JOIN_S, wait_s=WAIT_S)
        after = brokers.ask("cpu")
        stayed = members.ask("stay", seconds=stay_s)
        end = brokers.ask("cpu")
    count = groups * MEMBERS
    share = (end["cpu_s"] - after["cpu_s"]) / (end["time_s"] - after["time_s"])
    names = ("requests", "p50_ms", "p99_ms", "retries", "fenced", "settled")
    detail: dict[str, float | str] = {name: joined[name] for name in names}
    detail |= {"joins over s": joined["joined_s"], "brokers' CPU s": after["cpu_s"] - began["cpu_s"]}
    seconds = joined["seconds"] if joined["seconds"] >= 0 else WAIT_S
    beats: dict[str, float | str] = {name: stayed[name] for name in names}
    beats |= {"CPU µs for each": 1e6 * (end["cpu_s"] - after["cpu_s"]) / max(1, stayed["requests"])}
    beats |= {"CPU µs of a member in 1 s": 1e6 * share / count}
    return [
        Figure(NAME, f"{count} members, last join to assignment", seconds, "s", SETTLE_S_MAX, detail=detail),
        Figure(NAME, f"{count} members, heartbeats", share, "cores", CORE_SHARE_MAX, detail=beats),
    ]


def memory(options: Options) -> list[Figure]:
    """Measure how much more memory one broker takes for its members."""
    with Child("group_brokers", brokers=1, partitions=PARTITIONS) as broker:
        before = broker.memory_bytes()
        with members_of(broker, ONE_BROKER_GROUPS) as members:
            joined = members.ask("join", over_s=4.0, wait_s=WAIT_S)
            time.sleep(2.0)
            after = broker.memory_bytes()
    count = ONE_BROKER_GROUPS * MEMBERS
    detail: dict[str, float | str] = {"settled": joined["settled"], "before MiB": before / KIB**2}
    each = (after - before) / count / KIB
    return [Figure(NAME, f"memory of {count} members at one broker", each, "KiB each", MEMBER_KIB_MAX, detail=detail)]


def members_of(brokers: Child, groups: int) -> Child:
    """Start the process of the members, and connect all of them."""
    shape = {"groups": groups, "members": MEMBERS, "partitions": PARTITIONS, "session_ms": SESSION_MS}
    return Child("group_members", **{**brokers.ready, **shape})
