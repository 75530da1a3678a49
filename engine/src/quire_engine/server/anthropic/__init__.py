"""Anthropic's Messages API over the same chats: its requests, blocks, events and errors."""
