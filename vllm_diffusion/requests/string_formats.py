"""Formats of JSON Schema as expressions, the same for every back end and for tool calls.

Each allows values of its format only, as the JSON Schema Test Suite has them (llguidance's own
expressions allow 2021-02-29, and leap seconds at any minute). docs/use/requests.md has what they
leave out. They are expressions of ECMA and Rust at once: no look-around.
"""

from collections.abc import Mapping

# RFC 3339, without leap seconds, which most programs do not read; the year 0 is Python's gap.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]{{1,15}})?(?:[Zz]|[+-]{_HOUR}:{_SIXTY})"
# Units follow one another without a gap.
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S|)|)|[0-9]+M(?:[0-9]+S|)|[0-9]+S)"
_DATES = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D|)|)|[0-9]+M(?:[0-9]+D|)|[0-9]+D)"


def _maybe(expression: str) -> str:
    return f"(?:{expression}|)"


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _groups(most: int) -> str:
    """Return the expression of up to ``most`` groups of an address before its two colons."""
    return _maybe(f"(?:{_GROUP}:){{0,{most - 1}}}{_GROUP}")


_IPV6 = (
    f"(?:(?:(?:{_GROUP}:){{6}}|::(?:{_GROUP}:){{5}}"
    + "".join(f"|{_groups(most)}::(?:{_GROUP}:){{{5 - most}}}" for most in range(1, 6))
    + f")(?:{_GROUP}:{_GROUP}|{_IPV4})|{_groups(6)}::{_GROUP}|{_groups(7)}::)"
)


def _label(letters: str, most: int) -> str:
    """Return the expression of a label of a host name, without hyphens at its ends, and without
    two at its third place, which mark punycode: no expression tells whether that is well formed.

    Args:
        letters: Ranges of a class.
        most: Characters, at least 5.
    """
    end, any_ = f"[{letters}]", f"[{letters}-]"
    longer = f"{any_}(?:{end}{any_}|-{end}){any_}{{0,{most - 5}}}{end}"
    return end + _maybe(f"{any_}{{0,2}}{end}|{longer}")


_ASCII = "a-zA-Z0-9"
# Lower-case letters of scripts from left to right in which each letter may stand anywhere.
_LETTERS = "a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_LABEL, _SHORT = _label(_ASCII, 63), _label(_ASCII, 9)
_MIDDLE = _label(_ASCII, 30)
# Fifteen letters have up to 63 characters in punycode.
_IDN_LABEL = f"(?:{_LABEL}|{_label(_LETTERS, 15)})"
# A name has at most 253 characters: eight labels of 30, or three of 63 and six of 9.
_HOST = rf"(?:{_MIDDLE}(?:\.{_MIDDLE}){{0,7}}|{_LABEL}(?:\.{_LABEL}){{0,2}}(?:\.{_SHORT}){{0,6}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:[.\u3002\uff0e\uff61]{_IDN_LABEL}){{0,2}}(?:\.{_SHORT}){{0,6}}"


def _local(letters: str, most: int) -> str:
    """Return the expression of what stands before the sign of an address, of at most 64 octets.

    Args:
        letters: Ranges of a class, for letters and digits.
        most: Characters.
    """
    atom = f"[!#$%&'*+/=?^_`{{|}}~{letters}-]"
    parts = rf"{atom}{{1,{most // 4}}}(?:\.{atom}{{1,{most // 4 - 1}}}){{1,3}}"
    return f"{atom}{{1,{most}}}|{parts}"


_LITERAL = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"
# A letter of another script has up to three octets.
_IDN_LOCAL = f"{_local(_ASCII, 64)}|{_local('A-Z' + _LETTERS, 21)}"

# RFC 3987, without the noncharacters.
_WIDE = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane * 0x10000 + (0x1000 if plane == 14 else 0))}-{chr(plane * 0x10000 + 0xFFFD)}"
    for plane in range(1, 15)
)
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_PERCENT = "%[0-9a-fA-F]{2}"


def _addresses(wide: str, private: str) -> tuple[str, str]:
    """Return the expressions of a URI and of a reference, which may lack the scheme (RFC 3986).

    Args:
        wide: Ranges of what may stand anywhere beside ASCII.
        private: Ranges of what may stand in a query beside these.
    """
    signs = f"a-zA-Z0-9._~!$&'()*+,;={wide}-"
    name, character = (f"(?:[{more}{signs}]|{_PERCENT})" for more in ("", ":@"))
    user = _maybe(f"(?:[:{signs}]|{_PERCENT})*@")
    host = rf"(?:\[{_IPV6}\]|{name}*)" + _maybe(":[0-9]*")
    path = f"(?:/{character}*)*"
    rooted = f"//{user}{host}{path}|/" + _maybe(f"{character}+{path}")
    query = _maybe(rf"\?(?:[/?:@{private}{signs}]|{_PERCENT})*")
    tail = query + _maybe(f"#(?:[/?:@{signs}]|{_PERCENT})*")
    scheme = "[a-zA-Z][a-zA-Z0-9+.-]*:"
    absolute = scheme + _maybe(f"{rooted}|{character}+{path}") + tail
    first = f"(?:{scheme}{character}+|(?:[@{signs}]|{_PERCENT})+)"
    return absolute, f"(?:{_maybe(scheme)}{_maybe(rooted)}|{first}{path}){tail}"


_URI, _URI_REFERENCE = _addresses("", "")
_IRI, _IRI_REFERENCE = _addresses(_WIDE, _PRIVATE)
# RFC 6570, without the operators that it keeps for later and percent signs in names.
_NAME = r"[a-zA-Z0-9_]+(?:\.[a-zA-Z0-9_]+)*"
_VARIABLE = rf"{_NAME}(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?#\[\]{_WIDE}{_PRIVATE}-]|{_PERCENT}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
# What may be written of a pointer in JSON without an escape.
_POINTER = "(?:/(?:[ !#-.0-\\[\\]-}\u00a0-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]|~[01])*)*"


def _expressions() -> str:
    """Return the expression of what ECMA, Python and Rust read as one, with groups in groups."""
    times = r"(?:(?:[*+?]|\{[0-9]{1,2},?\})\??)?"
    listed = r"[a-zA-Z0-9_ .,:;@#%!/+*?$()]|\\[dDwWsSntr\[\]\\^-]"
    chosen = rf"\[\^?(?:a-z|A-Z|0-9|{listed})+\]"
    sign = r"[a-zA-Z0-9_ ,:;@#%&!'<>~=-]|\.|\\[dDwWsSntr.*+?()\[\]{}|^$/\\]"
    term = rf"(?:\^|\$|\\[bB]|\||(?:{sign}|{chosen}){times})"
    for _ in range(2):
        term = rf"(?:{term}|\((?:\?:)?{term}*\){times})"
    return f"{term}*"


# Known formats as expressions of strings that have them.
FORMATS: Mapping[str, str] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}[Tt]{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DATES}{_maybe(_CLOCK)}|{_CLOCK})",
    "email": f"(?:{_local(_ASCII, 64)})@(?:{_HOST}|{_LITERAL})",
    "idn-email": f"(?:{_IDN_LOCAL})@(?:{_IDN_HOST}|{_LITERAL})",
    "hostname": _HOST,
    "idn-hostname": _IDN_HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "iri": _IRI,
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": _expressions(),
}
