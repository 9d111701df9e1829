"""Random schedules of the ownership model, one for each seed; and the rules, each left out: what must then be found.

Four more rules are left out in `tests.model.directed`, by schedules that are written down.

`python -m tests.model.schedules [VARIANT] [SCHEDULES] [FIRST SEED]` runs one variant, or all of them.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from tests.model.ownership import Action, BrokenPromiseError, Model
from tests.model.parts import Rules

ALL_RULES = Rules()
ONE_BLOCK = replace(ALL_RULES, blocks=1)  # copies show with one block already, and sooner
VARIANTS: dict[str, Rules] = {
    "opened without the tail": replace(ONE_BLOCK, tail=False),
    "a window shorter than D": replace(ONE_BLOCK, window_ticks=1),
    "a proof dated at its answer": replace(ALL_RULES, proof_at_hand_over=False),
    "the queue refuses nothing": replace(ONE_BLOCK, refuse=False),
    "two publishes in flight": replace(ALL_RULES, one_in_flight=False),
    "a copy acked at once": replace(ALL_RULES, late_acks=False),
    "a given up epoch continues": replace(ALL_RULES, end_epoch=False),
    "resent in any order": replace(ALL_RULES, oldest_first=False),
    "old blocks are taken": replace(ONE_BLOCK, age=False),
    "a refusal keeps its stream": replace(ALL_RULES, refusal_closes=False),
}
FOUND_BY = {  # a seed whose schedule breaks a promise
    "opened without the tail": 2684,
    "a window shorter than D": 2684,
    "a proof dated at its answer": 6087,
    "the queue refuses nothing": 704,
    "two publishes in flight": 1501,
    "a copy acked at once": 27,
    "a given up epoch continues": 831,
    "resent in any order": 107,
    "old blocks are taken": 4227,
    "a refusal keeps its stream": 405,
}
WEIGHTS = {
    "tick": 6,
    "connect": 2,
    "give up block": 6,
    "claim": 3,
    "time out": 3,
    "crash": 1,
    "give up ring": 1,
    "drop": 2,
    "throttle": 1,
    "foreign": 1,
    "read": 5,
    "land": 10,
    "refuse landed": 2,
}
USUAL_WEIGHT = 12
FAVOURS = (0.25, 1, 1, 2, 4, 12)  # drawn for each kind of step, so that schedules differ more than by luck
NEEDED = frozenset({"send", "hear", "open", "take", "store", "publish", "land", "answer", "read answer"})
ACTORS = {"tick": "time", "foreign": "time", "land": "queue", "refuse landed": "queue", "drop": "queue"}
PRODUCER = frozenset({"connect", "send", "hear", "give up block"})


def run(rules: Rules, seed: int) -> list[Action]:
    """Run one schedule and return its steps. Raises: BrokenPromiseError, with them."""
    draw = random.Random(seed)
    model, taken = Model(rules), list[Action]()
    favour = {kind: max(draw.choice(FAVOURS), 2 if kind in NEEDED else 0) for kind in model.kinds}
    pause_rate = draw.choice((0.0, 0.05, 0.2))
    paused: dict[str, None] = {}
    actors = ["producer", "queue", *(f"broker {number}" for number in range(rules.brokers))]
    try:
        if draw.random() < 0.9:
            for kind in ("claim", "open", "land", "answer", "connect", "take", "hear", "send"):
                if kind in ("claim", "connect") or (kind, 0, 0) in model.actions():
                    taken.append((kind, 0, 0))
                    model.step(taken[-1])
        for _ in range(draw.randint(50, 150)):
            if draw.random() < pause_rate:
                actor = draw.choice(actors)
                if paused.pop(actor, actor) is actor:
                    paused[actor] = None
            possible = [action for action in model.actions() if _actor(action) not in paused]
            if not possible:
                paused.clear()
                continue
            weights = [WEIGHTS.get(action[0], USUAL_WEIGHT) * favour[action[0]] for action in possible]
            taken.append(draw.choices(possible, weights)[0])
            model.step(taken[-1])
        model.check()
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"seed {seed}: {error}; after {taken}; the queue holds {model.log}") from error
    return taken


def _actor(action: Action) -> str:
    kind = action[0]
    return "producer" if kind in PRODUCER else ACTORS.get(kind) or f"broker {action[1]}"


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
