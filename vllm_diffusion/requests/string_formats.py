"""Formats of JSON Schema as expressions, the same for every back end and for tool calls."""

from __future__ import annotations

from collections.abc import Mapping

_DAY = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,16}"
_PATH = r"[a-zA-Z0-9._~!$&'()*+,;=:@/-]{0,99}"
_TAIL = rf"{_PATH}(?:\?{_PATH})?(?:#[a-zA-Z0-9._~!$&'()*+,;=:@/?-]{0, 99})?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(?://{_LABEL}(?:\.{_LABEL}){{0,4}}(?::[0-9]{{1,4}})?(?:/{_TAIL})?|[a-zA-Z0-9]{_TAIL})"
_POINTER = r"(?:/(?:[a-zA-Z0-9_.-]|~[01])*)*"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+S)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATES = r"(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
# Known formats as expressions of strings that have them. Not all: no leap day, no mailbox in
# quotes.
FORMATS: Mapping[str, str] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": rf"P(?:[0-9]+W|{_DATES}(?:{_CLOCK})?|{_CLOCK})",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_LABEL}(?:\.{_LABEL}){{1,4}}",
    "idn-email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_LABEL}(?:\.{_LABEL}){{1,4}}",
    "hostname": r"[a-zA-Z](?:[a-zA-Z0-9]{0,15})(?:\.[a-zA-Z](?:[a-zA-Z0-9]{0,15})){0,4}",
    "idn-hostname": r"[a-zA-Z](?:[a-zA-Z0-9]{0,15})(?:\.[a-zA-Z](?:[a-zA-Z0-9]{0,15})){0,4}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": (
        r"(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|(?:[0-9a-fA-F]{1,4}:){1,3}(?::[0-9a-fA-F]{1,4}){1,3}|::1|::"
    ),
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": rf"{_URI}|/{_TAIL}",
    "iri-reference": rf"{_URI}|/{_TAIL}",
    "uri-template": rf"{_URI}|/{_TAIL}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": r"[a-zA-Z0-9_ ]*",
}
