"""The coordinator of a cluster: brokers as ephemeral nodes, topics and assignments as persistent ones, in ZooKeeper.

`layout` says where things lie, `session` is kazoo behind the event loop, `mirror` keeps what was read while watches
hold, `coordinator` is the port. kazoo is the extra `[zookeeper]`, and is imported when a coordinator is opened.
"""
