"""The client: producer, consumer and admin, sync and asyncio shells over the same machines."""
