"""Patches that break a rule of permissions, passwords and quotas, or of the items of queues and pop groups."""

from __future__ import annotations

RULES = "memq/permissions.py"
CHECKS = "memq/broker/permissions/checks.py"
OBJECT_TOPICS = "memq/broker/permissions/object_topics.py"
RESOURCES = "memq/broker/permissions/resources.py"
SHOWN = "memq/broker/permissions/shown.py"
LOGINS = "memq/broker/identity/logins.py"
SCRAM = "memq/scram.py"
QUOTAS = "memq/quotas.py"
QUOTA_BOOK = "memq/broker/ingest/quota_book.py"
SHARES = "memq/governor/quota_shares.py"
ITEMS = "memq/queues/machine.py"
KEYS = "memq/queues/keys.py"
POPS = "memq/queues/pop/groups.py"
POP_KEEPER = "memq/queues/pop/keeper.py"

# path, the rule that is broken, the text, what comes in its place
ACCESS_RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        RULES,
        "an allow before a deny wins",
        "    if denied is not None:\n        return AccessDecision(False, denied[1])\n    allowed = min(",
        "    allowed = min(",
    ),
    (
        RULES,
        "a request that no rule matches is allowed",
        "return AccessDecision(False) if allowed is None else",
        "return AccessDecision(True) if allowed is None else",
    ),
    (
        RULES,
        "a permission on some topics counts as one on all",
        "return _decision(permission, every, [each.all for each in found])",
        "return _decision(permission, [each.all for each in found], [each.all for each in found])",
    ),
    (
        RULES,
        "a deny of read denies describe",
        'each.find("deny", _COVERING[permission])',
        'each.find("deny", _ALLOWING[permission])',
    ),
    (
        CHECKS,
        "a superuser may speak as a broker",
        "patterns = self.peers if permission is Permission.PEER else self._free",
        "patterns = self._free",
    ),
    (
        CHECKS,
        "decisions by former rules stay",
        "        self._cache.clear()\n        self.version += 1\n",
        "        self.version += 1\n",
    ),
    (
        CHECKS,
        "one stale answer of the coordinator brings back former rules",
        "                if again != found:\n                    return\n",
        "",
    ),
    (
        CHECKS,
        "before the first read, a broker decides by no rules",
        "        if self._rules is None:\n            raise",
        "        if self._rules is None:\n            return RuleSet()\n            raise",
    ),
    (
        OBJECT_TOPICS,
        "a shared object needs a permission on its first topic alone",
        "for topic in topics] or unknown",
        "for topic in topics[:1]] or unknown",
    ),
    (
        RESOURCES,
        "a transaction moves positions in topics that its producer may not read",
        "(*call.ask.before, *call.ask.after)",
        "call.ask.before",
    ),
    (
        RESOURCES,
        "items of a pop group need no permission on its topic",
        "[*(Resource(ResourceKind.QUEUE, each) for each in queues), *map(topic_resource, topics)]",
        "[Resource(ResourceKind.QUEUE, each) for each in queues]",
    ),
    (
        SHOWN,
        "the description of a group names topics that are hidden",
        "            member.assigned = [each for each in member.assigned if seen(each)]\n",
        "            pass\n",
    ),
    (
        LOGINS,
        "passwords travel without TLS",
        "        if not self._encrypted:\n            raise",
        "        if False:\n            raise",
    ),
    (
        LOGINS,
        "a login that began before the password changed still counts",
        "if verdict is None or not self.holds(exchange.credential):",
        "if verdict is None:",
    ),
    (
        LOGINS,
        "a user with the name of a broker logs in",
        "found = None if reserved else _found(stored, user)",
        "found = _found(stored, user)",
    ),
    (
        SCRAM,
        "a proof is taken in another exchange than its own",
        'if found["c"] != _BINDING or found["r"] != self._nonce:',
        'if found["c"] != _BINDING:',
    ),
    (
        SCRAM,
        "a broker without the credential gets a proof with few iterations",
        "        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:  # fewer",
        "        if not iterations <= ITERATIONS_MAX:  # fewer",
    ),
    (
        SCRAM,
        "a client believes a broker that does not know its password",
        "if not self._server_signature or not hmac.compare_digest(given, self._server_signature):",
        "if not self._server_signature:",
    ),
    (
        SCRAM,
        "an old nonce of a false broker is taken",
        'if not found["r"].startswith(self._nonce) or len(found',
        "if len(found",
    ),
    (
        QUOTAS,
        "the default quota applies before that of the principal",
        "(not quota.name.endswith(EVERY), len(quota.name))",
        "(quota.name.endswith(EVERY), -len(quota.name))",
    ),
    (
        QUOTA_BOOK,
        "a principal has its whole quota at each broker once the governor is silent",
        "        elif share.until_s < now_s:\n            share.part = equal\n",
        "        elif share.until_s < now_s:\n            share.part = 1.0\n",
    ),
    (
        QUOTA_BOOK,
        "a connection too many is counted although it was refused",
        "<= use.connections:\n            raise",
        "<= use.connections:\n            use.connections += 1\n            raise",
    ),
    (
        SHARES,
        "a new governor gives out what the last one gave to others",
        "part = max(0.0, min(target, free, use.part if learning else target))",
        "part = max(0.0, min(target, free))",
    ),
    (
        SHARES,
        "a broker gets a part that another one still holds",
        "part = max(0.0, min(target, free, use",
        "part = max(0.0, min(target, use",
    ),
    (
        ITEMS,
        "an ack of a former lease ends an item of another worker",
        "elif status is not None and status.state is ItemState.LEASED and status.grant == lease.grant:",
        "elif status is not None and status.state is ItemState.LEASED:",
    ),
    (
        ITEMS,
        "a grant takes items that were given back for later",
        "            if status.state is ItemState.READY and status.due_ms > decision.now_ms:\n                continue",
        "            if False:\n                continue",
    ),
    (
        ITEMS,
        "a grant of a former owner counts",
        "        if decision.number <= self.last_grant:\n            return ()\n",
        "",
    ),
    (
        ITEMS,
        "a cancelled item is taken from its worker",
        "            elif status.state is ItemState.LEASED:\n                yield ItemOutcome.LEASED, end - begin\n",
        "",
    ),
    (
        ITEMS,
        "a purge ends items that are not dead",
        "elif isinstance(decision, PurgeDecision) and status.state is not ItemState.DEAD:",
        "elif False:",
    ),
    (
        ITEMS,
        "an extension makes a lease shorter",
        "lease_ms=max(status.lease_ms, lease_ms)",
        "lease_ms=lease_ms",
    ),
    (
        ITEMS,
        "a block that is enqueued again is new",
        "if first is not None or block.id.producer in self._ended:",
        "if first is not None:",
    ),
    (
        KEYS,
        "two items of an ordered key are leased at once",
        "if found is None or found.leased is not None:",
        "if found is None:",
    ),
    (
        KEYS,
        "a dedupe key counts behind its window",
        "return known.block if known is not None and known.until_ms > dedupe.since_ms else None",
        "return known.block if known is not None else None",
    ),
    (
        POPS,
        "a second owner adds the records of a batch again",
        "if at is None or not at.is_at(decision.begin) or decision",
        "if at is None or decision",
    ),
    (
        POPS,
        "a read for a removed group moves the group that has its name now",
        "        if known is None or known.life != decision.life:\n            return False\n        at",
        "        if known is None:\n            return False\n        at",
    ),
    (
        POPS,
        "a group begins again for a topic that was created again, with the positions of the former one",
        "        if known.topic_id != decision.topic_id:\n            return False\n",
        "",
    ),
    (
        ITEMS,
        "retention ends a record that a worker was granted meanwhile",
        "over or not block.is_stream or status.grant != lease.grant:",
        "over or not block.is_stream:",
    ),
    (
        POP_KEEPER,
        "a group reads on while its items pile up",
        " and self.left(queue) < AHEAD_ITEMS",
        "",
    ),
    (
        POP_KEEPER,
        "items of a removed group are still granted",
        "return block.is_stream and self.group(block.topic, place_of(block.key).life) is None",
        "return False",
    ),
)
