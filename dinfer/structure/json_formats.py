"""The formats of JSON Schema that are enforced, as patterns: all that its standard allows, or a part of that."""

_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,2}}"  # so short that the whole stays below 253 characters
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,16}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = rf"({_H16}:{_H16}|{_BYTE}(\.{_BYTE}){{3}})"
_PCHAR = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [f"({_H16}:){{6}}{_LS32}"]
        + [f"({_H16}(:{_H16}){{0,{n - 1}}})?::({_H16}:){{{5 - n}}}{_LS32}" if n else f"::({_H16}:){{5}}{_LS32}"
           for n in range(6)]
        + [f"({_H16}(:{_H16}){{0,5}})?::{_H16}", f"({_H16}(:{_H16}){{0,6}})?::"]
    ),
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_PCHAR}+(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?|{_PCHAR}+(/{_PCHAR}*)*)"
    rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?",
}  # fmt: skip
# Of these, the texts that are of a narrower format.
FORMATS |= dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), FORMATS["uri"])
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"json-pointer": r"(/([!-.0-}]|~[01])*)*"}
