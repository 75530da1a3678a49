"""TLS sockets for clients of servers that tests kill."""

import ssl


class ClosedIfLost(ssl.SSLSocket):
    """A socket that is closed if the server was killed between the connection and TLS: a ``sslsocket_class``.

    The standard library would lose it, and a later garbage collection would report it as unclosed.
    """

    def getpeername(self) -> object:
        """See ``socket.getpeername``, which the standard library calls before TLS begins."""
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError("the server closed the connection before TLS") from error
