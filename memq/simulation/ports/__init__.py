"""Store, queue, coordinator and disk as one process sees them: calls fail, hang, come late and lie."""
