"""When an X.509 certificate ends, read from its DER form: the standard library tells this of trusted ones only.

RFC 5280: Certificate = SEQUENCE {tbsCertificate, …}; tbsCertificate = SEQUENCE {[0] version, serialNumber, signature,
issuer, validity, …}; validity = SEQUENCE {notBefore, notAfter}, each a UTCTime or a GeneralizedTime.
"""

from datetime import UTC, datetime
from typing import NamedTuple

_SEQUENCE, _VERSION = 0x30, 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


class _Element(NamedTuple):
    tag: int
    begin: int
    end: int


def not_after(der: bytes) -> datetime:
    """Raises ValueError where this is no certificate."""
    try:
        certificate = _expect(der, 0, _SEQUENCE)
        body = _expect(der, certificate.begin, _SEQUENCE)
        field = _element(der, body.begin)
        if field.tag == _VERSION:
            field = _element(der, field.end)
        for _ in ("signature", "issuer", "validity"):
            field = _expect(der, field.end, _SEQUENCE)
        not_before = _element(der, field.begin)
        return _time(der, _element(der, not_before.end))
    except IndexError:
        raise ValueError("a certificate is cut off") from None


def _element(der: bytes, at: int) -> _Element:
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:  # then so many bytes hold the length
        count = length & 0x7F
        length = int.from_bytes(der[begin : begin + count], "big")
        begin += count
    return _Element(tag, begin, begin + length)


def _expect(der: bytes, at: int, tag: int) -> _Element:
    found = _element(der, at)
    if found.tag != tag:
        raise ValueError(f"not a certificate: tag {found.tag:#x} where {tag:#x} belongs")
    return found


def _time(der: bytes, element: _Element) -> datetime:
    text = der[element.begin : element.end].decode("ascii")
    if element.tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError(f"not a certificate: tag {element.tag:#x} where a time belongs")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
