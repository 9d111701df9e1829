"""The coordinator of a cluster in ZooKeeper: ephemeral nodes for brokers, persistent for topics.

`layout` has the paths and contents of nodes. `session` calls kazoo from the event loop. `mirror` is the cache, and
`coordinator` implements the port. kazoo is the extra `[zookeeper]`; `open_from_settings` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memq.errors import InvalidSettingError
from memq.governor.zookeeper.settings import SCHEME, ZookeeperSettings, check_together, parse_url
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings, read_section

if TYPE_CHECKING:
    from memq.governor.zookeeper.coordinator import ZookeeperCoordinator


def open_from_settings(settings: PartSettings, runtime: Runtime, cluster: str) -> ZookeeperCoordinator:
    """Return the coordinator that the settings name. Its first call connects.

    Raises: InvalidSettingError, also when kazoo is not installed; UnknownSettingError.
    """
    address = parse_url(settings.coordinator)
    section = check_together(read_section(SCHEME, settings.section(SCHEME), ZookeeperSettings))
    try:
        from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
    except ImportError as error:
        raise InvalidSettingError(
            f"coordinator '{settings.coordinator[:200]}' needs kazoo, which is not installed",
            hint="pip install 'memq[zookeeper]'",
        ) from error
    return ZookeeperCoordinator(address, section, runtime, cluster)
