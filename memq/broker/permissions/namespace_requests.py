"""Answers requests about namespaces: their list, and changes of their defaults and limits."""

from __future__ import annotations

from memq.broker.api import Answer, Call
from memq.broker.permissions.permission_requests import changed_at_coordinator
from memq.broker.services import Services
from memq.namespaces import namespace_named
from memq.permissions import Permission, RuleSet, changed_namespaces, topic_resource
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.namespace_messages import ChangeNamespaces, ListNamespaces, NamespaceAnswer, NamespaceUse
from memq.topic import namespace_of


class NamespaceRequests:
    """Lists and changes namespaces."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def list_namespaces(self, call: Call[ListNamespaces]) -> Answer:
        """Return the namespaces that are set, and those of topics that the principal may describe."""
        coordinator, wanted = self._services.coordinator, call.ask.name
        stored = (await coordinator.rules.read()).namespaces
        found = {each.name: NamespaceUse(namespace=each) for each in stored}
        for topic in await coordinator.topics():
            name = namespace_of(topic.name)
            if name and call.access.may(Permission.DESCRIBE, topic_resource(topic.name)):
                use = found.setdefault(name, NamespaceUse(namespace=namespace_named((), name)))
                use.topics += 1
                use.partitions += len(topic.partitions)
        uses = [found[name] for name in sorted(found) if wanted in ("", name)]
        return AdminAnswer(namespaces=NamespaceAnswer(uses=uses))

    async def change(self, call: Call[ChangeNamespaces]) -> Answer:
        """Set and remove defaults and limits, all or none. Topics that exist keep their settings.

        Raises: as `changed_namespaces`; as `changed_at_coordinator`.
        """
        ask = call.ask

        def changed(stored: RuleSet) -> RuleSet:
            return changed_namespaces(stored, ask.put, ask.remove)

        before, stored = await changed_at_coordinator(self._services, changed)
        put = [each for each in stored.namespaces if each not in before.namespaces]
        kept = {each.name for each in stored.namespaces}
        removed = [each.name for each in before.namespaces if each.name not in kept]
        return AdminAnswer(namespaces=NamespaceAnswer(put=put, removed=removed))
