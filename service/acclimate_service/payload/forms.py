"""Multipart forms: the files they carry, in order."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .errors import PayloadError
from .limits import PayloadLimits


def read_files(body: bytes, content_type: str, limits: PayloadLimits) -> list[bytes]:
    """The contents of all file parts of a `multipart/form-data` body, whatever their field names and types.

    Raises:
        PayloadError: `malformed_body`, `too_many_images`, `invalid_request` for a part that is not a file.
    """
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if not boundary:
        raise PayloadError("malformed_body", "multipart/form-data needs a boundary parameter in Content-Type")
    collector = _Collector(limits)
    try:
        collector.parser(boundary).write(body)
    except FormParserError as error:
        raise PayloadError("malformed_body", f"the multipart body cannot be parsed: {error}") from error
    if not collector.complete:
        raise PayloadError("malformed_body", "the multipart body ends before its closing boundary")
    return collector.files


class _Collector:
    """Gathers the parts that the push parser reports piece by piece."""

    def __init__(self, limits: PayloadLimits) -> None:
        self.files: list[bytes] = []
        self.complete = False
        self._limits = limits
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
                "on_headers_finished": self._check_is_file,
                "on_part_data": lambda data, start, end: self._content.extend(data[start:end]),
                "on_part_end": lambda: self.files.append(bytes(self._content)),
                "on_end": self._end,
            },
        )

    def _begin_part(self) -> None:
        self._limits.check_count(len(self.files) + 1)
        self._disposition = b""
        self._content.clear()

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _check_is_file(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options:
            name = options.get(b"name", b"").decode("utf-8", "replace")
            detail = f"form field {name[:40]!r} is not a file; send image files only, each part with a filename"
            raise PayloadError("invalid_request", detail)

    def _end(self) -> None:
        self.complete = True
