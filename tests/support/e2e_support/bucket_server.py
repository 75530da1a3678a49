"""An S3 bucket with the files of one folder: what a pod of `model_bucket` runs. It needs only the standard library.

It answers what a download asks: a listing below a prefix, HEAD, and GET with a range. Every request is public.
"""

import hashlib
import re
import sys
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


@cache
def entity_tag(path: Path) -> str:
    return f'"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}"'


class Bucket(BaseHTTPRequestHandler):
    """Serve `folder` as the prefix `prefix` of the bucket `models`."""

    folder: Path
    prefix = "quire-demo/"
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._object(with_body=False)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in parse_qs(url.query, keep_blank_values=True):
            self._answer(200, self._listing().encode(), {"Content-Type": "application/xml"})
        else:
            self._object(with_body=True)

    def _listing(self) -> str:
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        contents = "".join(
            f"<Contents><Key>{escape(self.prefix + path.name)}</Key><Size>{path.stat().st_size}</Size>"
            f"<ETag>{escape(entity_tag(path))}</ETag></Contents>"
            for path in files
        )
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="{NAMESPACE}"><Name>models</Name>'
            f"<Prefix>{self.prefix}</Prefix><KeyCount>{len(files)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        )

    def _object(self, *, with_body: bool) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/models/{self.prefix}")
        path = self.folder / name
        if "/" in name or not path.is_file():
            self._answer(404, b"", {})
            return
        content, headers, status = path.read_bytes(), {"ETag": entity_tag(path), "Accept-Ranges": "bytes"}, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            start, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            content, status = content[start : last + 1], 206
        self._answer(status, content, headers, with_body=with_body)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return the server of this folder; the caller runs it."""
    return ThreadingHTTPServer(("", port), type("FolderBucket", (Bucket,), {"folder": folder}))


if __name__ == "__main__":
    server(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
