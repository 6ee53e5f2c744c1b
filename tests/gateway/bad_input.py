"""What bad input is answered with: bad_input.toml read, and docs/bad-input.md made of it.

The file is the one place where the answers stand; test_bad_input.py sends every case of it.
`python -m tests.gateway.bad_input` writes the page anew.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("bad_input.toml")
PAGE = Path(__file__).parent.parent.parent / "docs" / "bad-input.md"

_NONE = "-"

# A string, or a list of such parts and of {text, times}.
Text = str | list[Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One request, or what stands for one, and its answer; the fields are those that bad_input.toml describes."""

    name: str
    number: int  # of its row
    scene: str = "embeddings"
    method: str = "POST"
    target: str = "/v1/embeddings"
    headers: Mapping[str, Text] = field(default_factory=dict)
    body: Text | None = None
    body_bytes: Text | None = None
    raw: Text | None = None
    status: int | None = None
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    closes: bool = False
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, object] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    leaves: bool = False
    note: str = ""
    needs: str = ""

    def __post_init__(self) -> None:
        if self.status is not None and self.status < 400:
            for name in ("type", "code", "param"):
                object.__setattr__(self, name, None)
        if self.param == _NONE:
            object.__setattr__(self, "param", None)

    def __str__(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def sent(self) -> bytes:
        """What goes over the wire."""
        if self.raw is not None:
            return joined(self.raw).encode("latin-1")
        body = joined(self.body_bytes).encode("latin-1") if self.body_bytes is not None else None
        if self.body is not None and body is None:
            body = joined(self.body).encode()
        headers: dict[str, str] = {"Host": "localhost"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {name: joined(value) for name, value in self.headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value != _NONE)
        return f"{self.method} {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    input: str
    note: str
    cases: list[Case]


@dataclass(frozen=True, slots=True)
class Table:
    scenes: dict[str, str]  # what each means, by name
    rows: list[Row]

    @property
    def cases(self) -> list[Case]:
        return [case for row in self.rows for case in row.cases]


def read_table() -> Table:
    """Raises TypeError for a field that a case does not have."""
    data = tomllib.loads(FILE.read_text())
    rows = []
    for row in data["rows"]:
        number, what, note, cases = row["number"], row.pop("input"), row.pop("note", ""), row.pop("cases")
        rows.append(Row(number, what, note, [Case(**{**row, **case}) for case in cases]))
    return Table(data["scenes"], rows)


def joined(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else joined(part["text"]) * part["times"] for part in text)


def found_at(place: str, value: object) -> object:
    """What stands at a place in JSON: keys and indexes with points between them; `*` is each of a list."""
    key, _, rest = place.partition(".")
    if key == "*":
        assert isinstance(value, list)
        return [found_at(rest, item) if rest else item for item in value]
    item = value[int(key)] if isinstance(value, list) else value[key]  # type: ignore[index]  # or the test fails
    return found_at(rest, item) if rest else item


def page(table: Table) -> str:
    """The page for people, in Markdown."""
    lines = [
        "# What bad input is answered with",
        "",
        "Made of `bad_input.toml` by `python -m tests.gateway.bad_input`; `test_bad_input.py` sends each of its cases",
        "to a real gateway, which must still serve afterwards. Every error has the body",
        '`{"error": {"message", "type", "param", "code"}, "detail"}`; `message`, which `detail` repeats, says what to',
        "change and never quotes the client. 429 and 503 say when to try again (`Retry-After`, `retry-after-ms`), what",
        "another try cannot change says `x-should-retry: false`.",
        "",
        "| # | input | status | type | code | param | cases |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table.rows:
        answers: dict[tuple[str, str, str], list[Case]] = {}
        for case in row.cases:
            answers.setdefault((_status(case), _code(case.type if case.code else None), _code(case.code)), []).append(
                case
            )
        number, what = str(row.number), _cell(f"{row.input}. {row.note}" if row.note else row.input)
        for (status, error_type, code), cases in answers.items():
            params = ", ".join(dict.fromkeys(_code(case.param) for case in cases if case.param is not None))
            names = "; ".join(_cell(case.name + (" *" if case.needs else "")) for case in cases)
            lines.append(f"| {number} | {what} | {status} | {error_type} | {code} | {params} | {names} |")
            number = what = ""
    needs = dict.fromkeys(case.needs for case in table.cases if case.needs)
    if needs:
        lines += ["", f"\\* Not yet: it needs {'; '.join(needs)}."]
    return "\n".join(lines) + "\n"


def _status(case: Case) -> str:
    status = "no answer" if case.status is None else str(case.status)
    return f"{status}, closed" if case.closes else status


def _code(text: str | None) -> str:
    return "" if text is None else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(read_table()))
