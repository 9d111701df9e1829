"""Random schedules of the ownership model, one for each seed; and the rules, each left out: what must then be found.

Seven more rules are left out in `tests.model.directed_schedules`, by schedules that are written down.

`python -m tests.model.schedules [VARIANT] [SCHEDULES] [FIRST SEED]` runs one variant, or all of them.
"""

from __future__ import annotations

import random
import sys
from bisect import bisect
from dataclasses import replace
from itertools import accumulate

from tests.model.ownership import Model
from tests.model.parts import ALL, NAME, ONE, Rules
from tests.model.possible_steps import Action
from tests.model.promises import BrokenPromiseError

ALL_RULES = Rules()
ONE_PRODUCER = replace(ALL_RULES, casts=((ALL,),))
ONE_BLOCK = replace(ALL_RULES, casts=((replace(ALL, blocks=1),),))  # copies show with one block already, and sooner
ACKED_WITH_1 = replace(ALL_RULES, casts=((ONE,),))
NAMED = replace(ALL_RULES, casts=(NAME,))
VARIANTS: dict[str, Rules] = {
    "opened without the tail": replace(ONE_BLOCK, tail=False),
    "names forgotten with the window": replace(NAMED, names=False),
    "a window shorter than D": replace(ONE_BLOCK, window_ticks=1),
    "a proof dated at its answer": replace(ONE_PRODUCER, proof_at_hand_over=False),
    "the queue refuses nothing": replace(ONE_BLOCK, refuse=False),
    "two publishes in flight": replace(ONE_PRODUCER, one_in_flight=False),
    "a copy acked at once": replace(ONE_PRODUCER, late_acks=False),
    "a given up epoch continues": replace(ONE_PRODUCER, end_epoch=False),
    "what was acked with 1 is dropped": replace(ACKED_WITH_1, hold=False),
    "held until another owner takes it": replace(ACKED_WITH_1, hold_until_shown=False),
    "dropped when it is refused": replace(ACKED_WITH_1, again_when_refused=False),
    "resent in any order": replace(ONE_PRODUCER, oldest_first=False),
    "old blocks are taken": replace(ONE_BLOCK, age=False),
    "a refusal keeps its stream": replace(ONE_PRODUCER, refusal_closes=False),
    "an instance begins with older blocks in the ring": replace(NAMED, ring_without=False),
    "an instance begins before the queue shows it": replace(NAMED, stated=False),
    "older instances are not fenced": replace(NAMED, fence=False),
}
FOUND_BY = {  # a seed whose schedule breaks a promise
    "opened without the tail": 6708,
    "names forgotten with the window": 1405,
    "a window shorter than D": 4369,
    "a proof dated at its answer": 3787,
    "the queue refuses nothing": 279,
    "two publishes in flight": 1351,
    "a copy acked at once": 8,
    "a given up epoch continues": 307,
    "what was acked with 1 is dropped": 1,
    "held until another owner takes it": 1,
    "dropped when it is refused": 224,
    "resent in any order": 64,
    "old blocks are taken": 1104,
    "a refusal keeps its stream": 31,
    "an instance begins with older blocks in the ring": 392,
    "an instance begins before the queue shows it": 520,
    "older instances are not fenced": 666,
}
WEIGHTS = {
    "tick": 6,
    "connect": 6,
    "reconnect": 1,
    "give up block": 6,
    "claim": 3,
    "time out": 3,
    "crash": 1,
    "give up ring": 1,
    "drop": 2,
    "throttle": 1,
    "foreign": 1,
    "read": 5,
    "look": 5,
    "land": 10,
    "refuse landed": 2,
}
USUAL_WEIGHT = 12
FAVOURS = (0.25, 1, 1, 2, 4, 12)  # drawn for each kind of step, so that schedules differ more than by luck
NEEDED = frozenset({"send", "hear", "open", "take", "store", "publish", "land", "answer", "read answer"})
NOBODY = frozenset({"tick", "foreign"})  # time, and other partitions
QUEUE = frozenset({"land", "refuse landed", "drop"})
OPENING = ("claim", "open", "land", "answer")
SENDING = (
    "connect",
    "take",
    "hear",
    "take",
    "state",
    "land",
    "answer",
    "hear",
    "send",
)  # a name begins first
Actor = tuple[str, int]  # may pause
CLIENT = frozenset({"send", "hear", "give up block"})


def run(rules: Rules, seed: int) -> list[Action]:
    """Run one schedule and return its steps. Raises: BrokenPromiseError, with them."""
    draw = random.Random(seed)
    model, taken = start(rules, draw), list[Action]()
    favour = {kind: max(draw.choice(FAVOURS), 2 if kind in NEEDED else 0) for kind in model.kinds}
    weight = {kind: WEIGHTS.get(kind, USUAL_WEIGHT) * each for kind, each in favour.items()}
    pause_rate = draw.choice((0.0, 0.05, 0.2))
    paused: dict[Actor, None] = {}
    actors: list[Actor] = [("queue", 0), *(("client", number) for number in range(len(model.producers)))]
    actors += (("broker", number) for number in range(rules.brokers))
    try:
        if draw.random() < 0.9:
            for kind in OPENING + SENDING:
                if kind in ("claim", "connect") or (kind, 0, 0) in model.actions():
                    taken.append((kind, 0, 0))
                    model.step(taken[-1])
        for _ in range(draw.randint(50, 150)):
            if draw.random() < pause_rate:
                actor = draw.choice(actors)
                if paused.pop(actor, actor) is actor:
                    paused[actor] = None
            possible = model.actions()
            if paused:
                possible = [action for action in possible if _actor(action) not in paused]
            if not possible:
                paused.clear()
                continue
            weights = list(accumulate([weight[action[0]] for action in possible]))
            taken.append(possible[bisect(weights, draw.random() * weights[-1])])
            model.step(taken[-1])
        model.check()
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"seed {seed}: {error}; after {taken}; the queue holds {model.log}") from error
    return taken


def start(rules: Rules, draw: random.Random) -> Model:
    """Return the model of a schedule, with one of the casts."""
    return Model(rules, draw.choice(rules.casts))


def _actor(action: Action) -> Actor:
    kind, number, more = action
    if kind in ("connect", "reconnect"):
        return "client", more
    if kind in NOBODY:
        return kind, 0
    return ("queue", 0) if kind in QUEUE else ("client" if kind in CLIENT else "broker", number)


def find(rules: Rules, seeds: range) -> tuple[int, str]:
    """Run schedules until one breaks a promise; return how many it took and what was broken, "" for nothing."""
    for count, seed in enumerate(seeds, 1):
        try:
            run(rules, seed)
        except BrokenPromiseError as error:
            return count, str(error)
    return len(seeds), ""


def main() -> None:
    """Run variants and say what they break."""
    wanted, schedules, first = [*sys.argv[1:], *("", "20000", "1")[len(sys.argv) - 1 :]]
    for name, rules in {"all rules": ALL_RULES, **VARIANTS}.items():
        if wanted in name:
            count, found = find(rules, range(int(first), int(first) + int(schedules)))
            print(f"{name}: {count} schedules: {found[:200] or 'nothing is broken'}", flush=True)


if __name__ == "__main__":
    main()
