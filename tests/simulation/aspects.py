"""The aspects of runs: each changes the plan of those seeds that have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from memq.compaction.plan import CompactionRule
from memq.limits import KIB, MIB
from memq.simulation.cluster import WRITE_PARTITIONS_MAX
from memq.simulation.ports.disk import DiskFaults
from memq.simulation.ports.wrong_answers import (
    COORDINATOR_LIES,
    MEMORY_LIES,
    QUEUE_LIES,
    STORE_LIES,
    WrongAnswerRates,
)
from memq.topic import BROADCAST_GROUP
from tests.simulation.plan_settings import draw_settings, that_remembers_names
from tests.simulation.reduced_constants import (
    CLOCK_ERROR,
    PARTS,
    PIECES,
    SNAPSHOTS,
    draw_constants,
)
from tests.simulation.rule_sets import ALLOWED
from tests.simulation.wishes import WISHES

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

ASPECTS = (
    "house",
    "levels",
    "jumps",
    "wander",
    "shared",
    "seize",
    "widen",
    "named",
    "staged",
    "disk",
    "reports",
    "cold",  # compaction; the name of an aspect is part of what seeds its draws
    "lies",
    "crowd",
    "thin",
    "direct",
    "part",
    "churn",
    "audit-command",
    "auditor",
    "flips",
    "truncate",  # logs are cut
    "refuse",
    "filter",
    "state-log",  # snapshots of state logs come often, and decisions about members are in pieces
    "operator",  # truncates the topic
    "seal",
    "delay",  # delayed records, some of them cancelled
    "broadcast",
    "waiting",  # retention waits for groups
    "retry",  # listeners, whose handlers fail
    "transaction",
    "idle",  # topics that expire
    "parts",  # parts of transactions are staged
    "queue",  # items of queues, and workers that die
    "pop",  # records of topics as items of queues
    "namespace",  # topics, groups and queues have names with a namespace
    "rules",  # permissions are withdrawn and given back
)
NAMESPACES = ("team", "t", "-", "cold")  # also parts of keys
RATE = 0.3  # of the seeds that draw an aspect
RATES = {"queue": 0.1, "pop": 0.1, "rules": 0.1}  # other ones: their processes work for as long as all others together
SCALE = "thin"  # the aspect that the others scale with
SWEEP_AGE_MS = 100_000  # calls take up to 20 s each way: late by 8 s, behind a cut link of 8 s, by a paused process
ACTIVE_ON_DISK_S = 30.0  # kills come often there
CALM_SWEEP_AGE_MS = 25_000
SWEEP_CONFIRM_MS = 12_000
NAMED_PACE_S_MAX = 0.4  # their rests take their time
SEIZED_PAUSE_S_MAX = 2.5  # of processes whose partitions go to another owner
AUDITS_LATER_MS = 3_600_000
STORM_SENDS_S = 80.0  # for how long a producer sends by keys in a storm, about


def _with_house(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let pointers expire and unnamed objects be swept, and the producers rest until they are old enough.

    The safety age must be twice what a batch may take from its put to its pointer's landing, and the clock error. A
    store that is sick in places makes rings hold stored batches for longer than that.
    """
    settings = plan.shape.settings
    retention_ms = settings.dedup_window_ms + draw.randrange(10_000)
    by_size = draw.random() < 0.3
    settings = msgspec.structs.replace(
        settings,
        retention_ms=0 if by_size else retention_ms,
        retention_bytes=draw.choice([1_000, 20_000]) if by_size else 0,
    )
    brokers = 1 if draw.random() < 0.7 else plan.shape.brokers
    calm = level == "calm"
    sweep_age_ms = CALM_SWEEP_AGE_MS if calm else SWEEP_AGE_MS
    shape = replace(
        plan.shape,
        settings=that_remembers_names(settings, plan.named_rest_s_max),
        brokers=brokers,
        housekeeping_s=1.0 if calm else 5.0,
        sweep_age_ms=sweep_age_ms,
        sweep_confirm_ms=SWEEP_CONFIRM_MS,
    )
    faults, chaos = plan.faults, plan.faults.chaos
    if calm:
        chaos = replace(chaos, sick_every_s=4.0, sick_s_max=4 * CALM_SWEEP_AGE_MS / 1000)
        faults = replace(faults, store=replace(faults.store, latency_s_max=1.0))  # sweeps that take their time
    rest_s = (retention_ms + plan.shape.clock_error_ms) / 1000 * draw.uniform(0.8, 1.2)
    return replace(plan, shape=shape, faults=replace(faults, chaos=chaos), rest_s=rest_s)


def _with_levels(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Add producers with acks=1 and acks=0, and stop brokers more often: a drain must lose nothing of theirs."""
    stop_every_s = 0.0 if level == "calm" else draw.choice([4.0, 12.0])
    faults = replace(plan.faults, chaos=replace(plan.faults.chaos, stop_every_s=stop_every_s))
    shape = replace(plan.shape, brokers=1 if draw.random() < 0.6 else plan.shape.brokers)
    return replace(
        plan, shape=shape, faults=faults, producers=(*plan.producers, draw.choice(["one", "one", "none"]), "one")
    )


def _with_seizures(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Take partitions from owners whose rings are full of ack=1 blocks, because the store is slow; kill no broker.

    Then nothing excuses a loss: held blocks go to the next owner, also during one more seizure, a move or a stop.
    Not with retention: forwarded blocks are out of order, and after retention an audit can't tell them from lost ones.
    """
    if plan.shape.housekeeping_s:
        return plan
    chaos = replace(
        plan.faults.chaos,
        kill_every_s=0.0,
        stop_every_s=draw.choice([0.0, 8.0, 30.0]),
        move_every_s=draw.choice([0.0, 5.0]),
        seize_every_s=draw.choice([1.0, 2.0, 5.0]),
        pause_every_s=draw.choice([0.0, 5.0]),
        pause_s_max=SEIZED_PAUSE_S_MAX,
        link_cut_every_s=draw.choice([0.0, 10.0]),
    )
    store = replace(plan.faults.store, latency_s_max=draw.choice([0.5, 2.0]))
    faults = replace(plan.faults, chaos=chaos, store=store)
    refuse: Literal["epoch", "age"] = "epoch" if draw.random() < 0.7 else "age"
    shape = replace(plan.shape, brokers=draw.choice([2, 3]), refuse=refuse, session_timeout_ms=5_000)
    return replace(plan, shape=shape, faults=faults, producers=(*plan.producers, "one", "one"), pace_s_max=0.1)


def _with_jumps(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let wall clocks jump, within the error that clocks may have."""
    chaos = replace(plan.faults.chaos, jump_every_s=draw.choice([0.5, 3.0, 15.0]))
    return replace(plan, faults=replace(plan.faults, chaos=chaos))


def _with_wandering(plan: Plan, _level: str, _draw: random.Random) -> Plan:
    """Let consumers pause and seek."""
    return replace(plan, wanders=True)


def _with_shared_objects(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let the batches of several partitions share objects."""
    settings = msgspec.structs.replace(plan.shape.settings, shared_objects=True)
    if (
        level == "calm" and settings.batch_blocks_max == 1
    ):  # one block at a time, 250 ms each, is less than producers send
        settings = msgspec.structs.replace(settings, uploads_in_flight_max=4)
    shape = replace(
        plan.shape, settings=settings, partitions=draw.choice([2, 3]), shared_age_ms=draw.choice([1, 50, 250])
    )
    return replace(plan, shape=shape)


def _with_names(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Add named producers, whose instances follow on each other, at once or after more than the dedup window.

    Retention by time leaves them their time: a name that was silent for so long is forgotten.
    """
    settings = plan.shape.settings
    if not plan.keyed:  # the shortest window that there may be: names are to be silent for longer
        window_ms = 4_000 + 2 * (1_000 + plan.shape.clock_error_ms) + plan.retry_ms
        settings = msgspec.structs.replace(
            settings, delivery_timeout_ms=4_000, stale_publish_ms=1_000, dedup_window_ms=window_ms
        )
    rest_s = settings.dedup_window_ms / 1000 * 1.4
    shape = replace(plan.shape, settings=that_remembers_names(settings, rest_s))
    chaos = plan.faults.chaos
    if level != "calm":
        chaos = replace(chaos, move_every_s=draw.choice([3.0, 10.0]))
    faults = replace(plan.faults, chaos=chaos)
    producers, pace_s_max = (*plan.producers[:1], "named"), min(plan.pace_s_max, NAMED_PACE_S_MAX)
    return replace(
        plan, shape=shape, faults=faults, producers=producers, named_rest_s_max=rest_s, pace_s_max=pace_s_max
    )


def _with_staging(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Add writers that stage, and repeat their commits at once or after more than the dedup window."""
    named = _with_names(plan, level, draw)
    chaos = named.faults.chaos
    faults = replace(named.faults, chaos=replace(chaos, kill_every_s=min(chaos.kill_every_s or 8.0, 8.0)))
    return replace(named, faults=faults if level != "calm" else named.faults, producers=(*plan.producers[:2], "staged"))


def _with_widening(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let write partitions be split and joined, while producers send by keys: each key keeps its order.

    All of them give up after 30 s. A storm may need longer for an opening, in which a call may hang for 40 s: there
    they send for 80 s, or half of the runs would end with nothing in the queue.
    """
    before = plan.shape.settings
    window_ms = 30_000 + 2 * (before.stale_publish_ms + plan.shape.clock_error_ms) + plan.retry_ms
    settings = msgspec.structs.replace(
        before,
        write_partitions_max=WRITE_PARTITIONS_MAX,
        delivery_timeout_ms=30_000,
        dedup_window_ms=window_ms,
        retention_ms=max(before.retention_ms, window_ms) if before.retention_ms else 0,
    )
    kinds = tuple("product" if kind == "plain" else kind for kind in plan.producers)
    chaos = replace(plan.faults.chaos, reshape_every_s=draw.choice([1.0, 5.0]))
    shape = replace(plan.shape, settings=settings)
    plan = replace(plan, shape=shape, faults=replace(plan.faults, chaos=chaos), producers=kinds, keyed=True)
    if level != "stormy" or chaos.seize_every_s:  # that one asks for full rings
        return plan
    return replace(plan, pace_s_max=max(plan.pace_s_max, 2 * STORM_SENDS_S / plan.blocks))


def _with_disk(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Keep ack=1 on disk, and kill brokers whose rings are full, since the store is slow: nothing excuses a loss.

    Not with retention: a broker sets blocks aside that it can't tell from copies.
    """
    if plan.shape.housekeeping_s:
        return plan
    chaos = plan.faults.chaos
    chaos = replace(chaos, kill_every_s=draw.choice([4.0, 8.0, 20.0]), seize_every_s=draw.choice([0.0, 5.0]))
    rate = draw.choice([0.0, 0.01, 0.1])
    disk = DiskFaults(draw.choice([0.001, 0.1]), draw.choice([0.02, 0.5]), before_rate=rate / 2, after_rate=rate / 2)
    store = replace(plan.faults.store, latency_s_max=draw.choice([0.2, 1.0, 3.0]))
    shape = replace(plan.shape, settings=msgspec.structs.replace(plan.shape.settings, ack1="disk"))
    faults = replace(plan.faults, chaos=chaos, disk=disk, store=store)
    producers = (*plan.producers, "one", "one")
    plan = replace(plan, shape=shape, faults=faults, producers=producers, blocks=min(plan.blocks, 60), pace_s_max=0.2)
    if draw.random() < 0.4:  # of a sick disk for up to minutes
        chaos = replace(chaos, disk_every_s=draw.choice([3.0, 20.0]), disk_s_max=draw.choice([5.0, 60.0, 150.0]))
        return replace(plan, faults=replace(faults, chaos=chaos))
    return replace(plan, active_s=ACTIVE_ON_DISK_S, settle_s=90.0 if level == "calm" else plan.settle_s)


def _with_reports(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let clients report what they do; plain producers can't."""
    shape = replace(plan.shape, audit_interval_ms=draw.choice([500, 1_000, 5_000]))
    reporting = any(kind != "plain" for kind in plan.producers)
    return replace(plan, shape=shape, producers=plan.producers if reporting else (*plan.producers, "product"))


def _with_compaction(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Compact what is older than the dedup window, well before retention takes it, and let consumers go back to it.

    Producers rest until that has happened to what they sent before. Not where no retention may be, see there.
    """
    if not plan.shape.housekeeping_s:
        if plan.shape.settings.ack1 == "disk" or plan.faults.chaos.seize_every_s:
            return plan
        plan = _with_house(plan, level, draw)
    settings = plan.shape.settings
    clock_error_ms = plan.shape.clock_error_ms
    compact_age_ms = settings.dedup_window_ms + clock_error_ms
    if settings.retention_ms:
        retention_ms = max(settings.retention_ms, compact_age_ms + draw.randrange(20_000, 50_000))
        settings = msgspec.structs.replace(settings, retention_ms=retention_ms)
    rule = CompactionRule(compact_age_ms, draw.choice([300, 3_000]), draw.random() < 0.9)
    rest_s = (compact_age_ms + clock_error_ms) / 1000 + draw.uniform(10.0, 40.0)
    shape = replace(plan.shape, settings=settings, compaction=rule, housekeeping_s=5.0)
    active_s = max(plan.active_s, rest_s + 60.0)
    return replace(plan, shape=shape, rest_s=rest_s, active_s=active_s, wanders=True)


def _with_audit_commands(plan: Plan, _level: str, _draw: random.Random) -> Plan:
    """Audit at any moment, while brokers hold ack=1 blocks.

    Not with retention: forwarded blocks are out of order, and after retention an audit can't tell them from lost ones.
    Not where services lie. With the disk nothing but a broker holds a record, if the queue refuses a lower
    epoch: no pointer is late then, and audits need not wait for one.
    """
    if plan.shape.housekeeping_s or plan.faults.lies:
        return plan
    producers = (*plan.producers, "one")
    if plan.shape.settings.ack1 != "disk":
        return replace(plan, audits=True, producers=producers)
    shape = replace(plan.shape, refuse="epoch")
    return replace(plan, audits=True, audits_later_ms=AUDITS_LATER_MS, producers=producers, shape=shape)


def _with_lies(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let one or two services give wrong answers, some kinds of them, for single calls and for up to minutes."""
    known = {"store": STORE_LIES, "queue": QUEUE_LIES, "coordinator": COORDINATOR_LIES}
    lies: dict[str, WrongAnswerRates] = {}
    for service in draw.sample(list(known), draw.choice([1, 1, 2])):
        kinds = tuple(draw.sample(known[service], draw.randint(1, 3)))
        rate = draw.choice([0.0, 0.01, 0.05])
        lies[service] = WrongAnswerRates(kinds, rate, draw.choice([5.0, 15.0, 40.0]), draw.choice([2.0, 20.0, 60.0]))
    lies["memory"] = WrongAnswerRates(MEMORY_LIES, draw.choice([0.0, 0.05, 0.3]))
    return replace(plan, faults=replace(plan.faults, lies=lies))


def _with_a_crowd(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Run up to ten brokers and seven members on up to six partitions; each producer sends less, for time's sake.

    Where the plan asks for one broker, since no other may take its partitions over, there is one.
    """
    brokers = 1 if plan.shape.brokers == 1 else draw.randint(4, 10)
    shape = replace(plan.shape, brokers=brokers, partitions=max(plan.shape.partitions, draw.randint(2, 6)))
    members = tuple(f"g{draw.randrange(2)}" for _ in range(draw.randint(4, 7)))
    return replace(plan, shape=shape, consumers=members, blocks=min(plan.blocks, 60))


def _with_thin_margins(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let times be short, clocks as wrong as they may be, and everything hold little: bounds are met all the time."""
    constants = draw_constants(draw)
    error_ms = int(constants[CLOCK_ERROR])
    stale_ms = draw.choice([1_000, 1_000, 2_000])
    settings = draw_settings(stale_ms, draw.choice([1_000, 4_000, 10_000]), draw, error_ms, retry_ms=plan.retry_ms)
    settings = msgspec.structs.replace(settings, batch_bytes_max=draw.choice([4 * KIB, 8 * MIB]))
    shape = replace(
        plan.shape,
        settings=settings,
        clock_error_ms=error_ms,
        clocks_at_bounds=draw.random() < 0.7,
        slab_bytes=draw.choice([4, 8, 32]) * KIB,
        memory_bytes_max=draw.choice([1, 2]) * MIB,
        prefetch_bytes_max=4 * KIB,
    )
    return replace(plan, shape=shape, constants=constants)


def _with_direct_writers(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Add writers whose tasks run again with their rows in another order, as those of Spark do."""
    return replace(plan, producers=(*plan.producers[:2], *("direct",) * draw.choice([1, 1, 2])))


def _with_a_sick_part(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let what queue or store have of one partition fail or hang: in a calm world no other one may wait for it."""
    chaos = replace(plan.faults.chaos, part_every_s=draw.choice([1.0, 5.0]), part_s_max=draw.choice([10.0, 60.0]))
    shape = replace(plan.shape, partitions=max(plan.shape.partitions, draw.choice([2, 3, 4])))
    return replace(plan, shape=shape, faults=replace(plan.faults, chaos=chaos))


def _with_churn(plan: Plan, _level: str, _draw: random.Random) -> Plan:
    """Add a process that makes and deletes topics."""
    return replace(plan, producers=(*plan.producers, "churn"))


def _with_an_auditor(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let the live audit run as a process, on what clients report."""
    return replace(plan if plan.shape.audit_interval_ms else _with_reports(plan, level, draw), audited=True)


def _with_changed_bits(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Change bits on the way between clients and brokers, and between brokers."""
    network = replace(plan.faults.network, flip_rate=draw.choice([0.001, 0.01, 0.05]))
    return replace(plan, faults=replace(plan.faults, network=network))


def _with_cut_logs(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Cut logs, and let them grow over the same offsets: only what was lost may be missing.

    The live audit is left out, because it reports lost records. A cut may take the `opened` that remembers a name whose
    records retention took. With compaction, cuts are rarer, and take only pointers that are too young for any manifest:
    readers of a manifest over lost offsets skip the new pointers there. The queue refuses by age, as Kafka does: of
    the queues, only Kafka can cut a log alone. So a pointer may be late, and audits judge as of now.
    """
    house = plan.shape.housekeeping_s and "named" in plan.producers
    if plan.shape.audit_interval_ms or plan.faults.lies or house:
        return plan
    compaction = plan.shape.compaction
    every_s = draw.choice([20.0, 40.0, 80.0] if compaction else [2.0, 5.0, 15.0])
    age_ms = compaction.age_ms - plan.shape.clock_error_ms if compaction else 0
    live_rate = draw.choice([0.0, 0.5, 1.0])
    chaos = replace(plan.faults.chaos, log_cut_every_s=every_s, log_cut_live_rate=live_rate, log_cut_age_ms_max=age_ms)
    shape = replace(plan.shape, refuse="age")
    return replace(plan, shape=shape, faults=replace(plan.faults, chaos=chaos), audits_later_ms=0)


def _with_refusals(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Let ports of live brokers refuse new connections, some for long; partitions move, so that clients make some."""
    chaos = replace(
        plan.faults.chaos,
        refuse_every_s=draw.choice([2.0, 6.0]),
        refuse_s_max=draw.choice([3.0, 60.0]),
        move_every_s=draw.choice([1.0, 4.0]),
        suspicion_every_s=draw.choice([0.0, 0.3, 2.0]),
    )
    shape = replace(plan.shape, brokers=3, partitions=max(plan.shape.partitions, draw.choice([2, 4])))
    return replace(plan, shape=shape, faults=replace(plan.faults, chaos=chaos))


def _with_filters(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Send records with tags and headers, to groups of which one or more have a filter."""
    groups = list(dict.fromkeys(plan.consumers))
    draw.shuffle(groups)
    filtered = groups[: draw.randint(1, len(groups))]
    return replace(plan, wishes={group: draw.choice(WISHES) for group in filtered})


def _with_state_logs(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let snapshots of state logs come often, and decisions about members be in pieces."""
    small = {SNAPSHOTS: draw.choice([3.0, 15.0]), PIECES: draw.choice([60, 150, 300])}
    return replace(plan, constants={**plan.constants, **small})


def _with_an_operator(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Add an operator who truncates the topic; not where no retention may be. Else nothing may go without one."""
    if not plan.shape.housekeeping_s:
        if plan.shape.settings.ack1 == "disk" or plan.faults.chaos.seize_every_s or plan.audits:
            return plan
        plan = _with_house(plan, level, draw)
        settings = msgspec.structs.replace(plan.shape.settings, retention_ms=0, retention_bytes=0)
        plan = replace(plan, shape=replace(plan.shape, settings=settings))
    return replace(plan, producers=(*plan.producers, "operator"))


def _with_waiting_retention(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let retention wait for some of the groups, up to a limit, or for one that never comes."""
    if not plan.shape.housekeeping_s:
        if plan.shape.settings.ack1 == "disk" or plan.faults.chaos.seize_every_s or plan.audits:
            return plan
        plan = _with_house(plan, level, draw)
    settings = plan.shape.settings
    groups = draw.sample(sorted({*plan.consumers, "absent"}), 1)
    limit_ms = max(settings.retention_ms, settings.dedup_window_ms) + draw.choice([5_000, 60_000])
    settings = msgspec.structs.replace(settings, retention_groups=",".join(groups), retention_groups_ms_max=limit_ms)
    return replace(plan, shape=replace(plan.shape, settings=settings))


def _with_broadcast(plan: Plan, _level: str, _draw: random.Random) -> Plan:
    """Let each consumer read all, with stored positions of its own."""
    names = tuple(f"{BROADCAST_GROUP}-{number}" for number in range(len(plan.consumers)))
    return replace(plan, consumers=names, wishes=None)


def _with_sealed_topics(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Add a process that seals topics while it writes. The store is slow, unless the age of the sweep is short."""
    store = plan.faults.store
    if not plan.shape.housekeeping_s:
        store = replace(store, latency_s_max=draw.choice([2.0, 6.0]))
    return replace(plan, faults=replace(plan.faults, store=store), producers=(*plan.producers, "seal"))


def _with_held(plan: Plan, level: str, draw: random.Random, kind: str) -> Plan:
    """Add producers whose records are held; not where logs are cut: what a log lost is not released again."""
    if plan.faults.chaos.log_cut_every_s:
        return plan
    slower = plan.faults.chaos.slower(draw.choice([1, 3]))  # else no record is held in a storm
    faults = replace(plan.faults, chaos=slower)
    small = {"memq.holds.keeper:UNIT_BLOCKS_MAX": draw.choice([1, 3, 512]), "memq.holds.storing:OBJECT_BYTES": 2_000}
    return replace(plan, faults=faults, producers=(*plan.producers, kind), constants={**plan.constants, **small})


def _with_parts(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Let most parts of transactions be staged; the sweep takes old ones, where no writer asks for old batches."""
    if plan.faults.chaos.log_cut_every_s:
        return plan
    if "transaction" not in plan.producers:
        plan = _with_held(plan, level, draw, "transaction")
    plan = replace(plan, constants={**plan.constants, PARTS: draw.choice([100, 1_000])})
    if "staged" in plan.producers:
        return plan
    return replace(plan, shape=replace(plan.shape, staged_age_ms=2 * plan.shape.sweep_age_ms))


def _with_pop_groups(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Add pop groups, which read ahead a little in some runs, and take batches in several decisions."""
    if plan.faults.chaos.log_cut_every_s:
        return plan
    small = {
        "memq.queues.pop.keeper:AHEAD_ITEMS": draw.choice([10, 10_000]),
        "memq.queues.pop.keeper:AHEAD_BLOCKS": draw.choice([5, 2_000]),
        "memq.queues.pop.keeper:BLOCKS_AT_ONCE": draw.choice([1, 500]),
        "memq.broker.service_partitions.pop_partition:PAGE_BYTES": draw.choice([1, 64 * KIB]),
        "memq.broker.service_partitions.pop_partition:WHOLE_BYTES": draw.choice([0, 512 * KIB]),
        "memq.broker.service_partitions.topic_places:KNOWN_MAX": draw.choice([1, 1_000]),
    }
    plan = _with_topics(plan, level, draw, "pop")
    return replace(plan, constants={**plan.constants, **small})


def _with_topics(plan: Plan, _level: str, _draw: random.Random, kind: str) -> Plan:
    """Add a process with topics of its own; not where logs are cut, which takes retries, and records of idle topics."""
    if plan.faults.chaos.log_cut_every_s:
        return plan
    often = {"memq.broker.upkeep.idle_topics:ROUND_S": 1.0}
    return replace(plan, producers=(*plan.producers, kind), constants={**plan.constants, **often})


def _with_namespaces(plan: Plan, _level: str, draw: random.Random) -> Plan:
    """Put the topic and the groups into namespaces; topics and queues of other processes follow the topic."""
    group_of = {name: f"{draw.choice(NAMESPACES)}/{name}" for name in dict.fromkeys(plan.consumers)}
    group_of |= {name: name for name in group_of if name.startswith(BROADCAST_GROUP)}
    settings = plan.shape.settings
    waits = ",".join(group_of.get(name, name) for name in settings.retention_groups.split(","))
    shape = replace(
        plan.shape,
        topic=f"{draw.choice(NAMESPACES)}/{plan.shape.topic}",
        settings=msgspec.structs.replace(settings, retention_groups=waits),
    )
    wishes = None if plan.wishes is None else {group_of.get(name, name): wish for name, wish in plan.wishes.items()}
    return replace(plan, shape=shape, consumers=tuple(group_of[name] for name in plan.consumers), wishes=wishes)


def _with_rules(plan: Plan, level: str, draw: random.Random) -> Plan:
    """Check permissions, and add an operator who changes them; not where each partition must answer in time."""
    if plan.faults.chaos.log_cut_every_s or plan.faults.chaos.part_every_s:
        return plan
    kinds = tuple("product" if kind == "plain" else kind for kind in plan.producers)
    plan = replace(plan, producers=kinds, shape=replace(plan.shape, rules=ALLOWED))
    return _with_topics(plan, level, draw, "rules")


CHANGES: dict[str, Callable[[Plan, str, random.Random], Plan]] = {
    "house": _with_house,
    "levels": _with_levels,
    "jumps": _with_jumps,
    "wander": _with_wandering,
    "shared": _with_shared_objects,
    "seize": _with_seizures,
    "widen": _with_widening,
    "named": _with_names,
    "staged": _with_staging,
    "disk": _with_disk,
    "reports": _with_reports,
    "cold": _with_compaction,
    "lies": _with_lies,
    "audit-command": _with_audit_commands,
    "crowd": _with_a_crowd,
    SCALE: _with_thin_margins,
    "direct": _with_direct_writers,
    "part": _with_a_sick_part,
    "churn": _with_churn,
    "auditor": _with_an_auditor,
    "flips": _with_changed_bits,
    "truncate": _with_cut_logs,
    "refuse": _with_refusals,
    "filter": _with_filters,
    "state-log": _with_state_logs,
    "operator": _with_an_operator,
    "seal": _with_sealed_topics,
    "delay": partial(_with_held, kind="delay"),
    "transaction": partial(_with_held, kind="transaction"),
    "parts": _with_parts,
    "broadcast": _with_broadcast,
    "waiting": _with_waiting_retention,
    "retry": partial(_with_topics, kind="listen"),
    "idle": partial(_with_topics, kind="idle"),
    "queue": partial(_with_topics, kind="queue"),
    "pop": _with_pop_groups,
    "namespace": _with_namespaces,
    "rules": _with_rules,
}
