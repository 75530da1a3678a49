"""The expiry date of an X.509 certificate, read from its DER form.

The standard library returns it for trusted certificates only. The layout is RFC 5280's: Certificate = SEQUENCE
{tbsCertificate, …}; tbsCertificate = SEQUENCE {[0] version, serialNumber, signature, issuer, validity, …};
validity = SEQUENCE {notBefore, notAfter}, each a UTCTime or a GeneralizedTime.
"""

from datetime import UTC, datetime
from typing import NamedTuple

_SEQUENCE, _VERSION = 0x30, 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


class _Element(NamedTuple):
    tag: int
    start: int
    end: int


def not_after(der: bytes) -> datetime:
    """Return when the certificate expires. Raise ValueError if this is not a certificate."""
    try:
        certificate = _expect(der, 0, _SEQUENCE)
        body = _expect(der, certificate.start, _SEQUENCE)
        field = _element(der, body.start)
        if field.tag == _VERSION:
            field = _element(der, field.end)
        for _ in ("signature", "issuer", "validity"):
            field = _expect(der, field.end, _SEQUENCE)
        not_before = _element(der, field.start)
        return _time(der, _element(der, not_before.end))
    except IndexError:
        raise ValueError("the certificate is truncated") from None


def _element(der: bytes, at: int) -> _Element:
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:  # then the length is in this many bytes
        count = length & 0x7F
        length = int.from_bytes(der[start : start + count], "big")
        start += count
    return _Element(tag, start, start + length)


def _expect(der: bytes, at: int, tag: int) -> _Element:
    found = _element(der, at)
    if found.tag != tag:
        raise ValueError(f"not a certificate: expected tag {tag:#x}, got {found.tag:#x}")
    return found


def _time(der: bytes, element: _Element) -> datetime:
    text = der[element.start : element.end].decode("ascii")
    if element.tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError(f"not a certificate: expected a time, got tag {element.tag:#x}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
