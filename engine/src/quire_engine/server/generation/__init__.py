"""The answers of one HTTP request while the engine generates them: queued, followed, streamed, ended."""
