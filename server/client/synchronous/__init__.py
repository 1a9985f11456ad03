"""The synchronous client, generated from the asynchronous one by ``make client``."""
