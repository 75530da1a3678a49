"""Worker processes for what a client can make slow or large: frames between them and the server, and their end."""
