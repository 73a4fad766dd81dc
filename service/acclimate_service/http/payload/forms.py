"""Multipart forms: the files they carry, in order, and one field of labels beside them."""

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .limits import PayloadError, PayloadLimits


@dataclass(frozen=True, slots=True)
class Form:
    """The contents of the file parts, and of the part that has the name asked for, if there is one."""

    files: list[bytes]
    field: bytes | None


def read_form(body: bytes, content_type: str, limits: PayloadLimits, field: str | None = None) -> Form:
    """Read a `multipart/form-data` body, whatever the names and types of its file parts.

    Raises:
        PayloadError: `malformed_body`, `too_many_images`, `invalid_request` for a part that is neither a file nor the
            one named `field`, `invalid_labels` for one so named that has more bytes than labels have.
    """
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if not boundary:
        raise PayloadError("malformed_body", "multipart/form-data needs a boundary parameter in Content-Type")
    collector = _Collector(limits, field)
    try:
        collector.parser(boundary).write(body)
    except FormParserError as error:
        raise PayloadError("malformed_body", f"the multipart body cannot be parsed: {error}") from error
    if not collector.complete:
        raise PayloadError("malformed_body", "the multipart body ends before its closing boundary")
    return Form(collector.files, collector.field)


class _Collector:
    """Gathers the parts that the push parser reports piece by piece."""

    def __init__(self, limits: PayloadLimits, field: str | None) -> None:
        self.files: list[bytes] = []
        self.field: bytes | None = None
        self.complete = False
        self._limits = limits
        self._field = None if field is None else field.encode()
        self._is_field = False
        self._name = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._content = bytearray()

    def parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._check_kind,
                "on_part_data": self._add,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def _begin_part(self) -> None:
        self._disposition = b""
        self._content.clear()

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _check_kind(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        self._is_field = self._field is not None and name == self._field
        if self._is_field and self.field is not None:
            raise PayloadError("invalid_request", f"form field {name.decode()!r} is there twice")
        if self._is_field:
            return
        if b"filename" not in options:
            shown = name.decode("utf-8", "replace")[:40]
            detail = f"form field {shown!r} is not a file; send image files only, each part with a filename"
            raise PayloadError("invalid_request", detail)
        self._limits.check_count(len(self.files) + 1)

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._content.extend(data[start:end])
        if self._is_field:
            self._limits.check_labels(len(self._content))

    def _end_part(self) -> None:
        if self._is_field:
            self.field = bytes(self._content)
        else:
            self.files.append(bytes(self._content))

    def _end(self) -> None:
        self.complete = True
