"""What users hold: producer, consumer and admin, sync and asyncio shells over the same pure machines."""
