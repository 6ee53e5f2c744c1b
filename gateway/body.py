"""Reading a request's body: only JSON in UTF-8, plain, within a size, a number of chunks and a time."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, StreamReader, web

from common.errors import InvalidRequest, RequestTimeout, TooLarge, UnsupportedMedia
from gateway.answers import JSON

_MAX_CHUNKS = 65_536  # of one body: each costs far more than its bytes


class ExpectationFailed(InvalidRequest):
    status = 417
    default_code = "expectation_failed"


class BadRequest(InvalidRequest):
    """What came is not HTTP as we take it. The connection closes: where the next request begins is unknown."""

    default_code = "bad_request"


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a JSON request, whole.

    Raises:
        UnsupportedMedia: it is not declared as JSON in UTF-8, or is encoded in any way.
        TooLarge: more than `max_bytes`, or too many chunks; the rest is not read.
        ExpectationFailed: `Expect` asks for anything but 100-continue.
        RequestTimeout: it was not there in time.
        BadRequest: its chunks are malformed.
    """
    _check_media(request)
    declared = request.content_length
    if declared is not None and declared > max_bytes:
        raise _body_too_large(max_bytes)
    expectation = request.headers.get("Expect")
    if expectation is not None:
        if expectation.lower() != "100-continue":
            raise ExpectationFailed("Expect: only 100-continue is understood.")
        if request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
    content = request.content
    chunked = "Transfer-Encoding" in request.headers
    try:
        if content.is_eof() and not chunked:
            return content.read_nowait()
        async with asyncio.timeout(timeout_s):
            return await _read_stream(content, max_bytes, chunked=chunked)
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {timeout_s:g} s. Send it again.") from None
    except web.RequestPayloadError:
        raise BadRequest("The body's chunks are malformed.") from None


async def _read_stream(content: StreamReader, max_bytes: int, *, chunked: bool) -> bytes:
    body = bytearray()
    num_chunks = 0
    while True:
        if chunked:
            data, is_chunk_end = await content.readchunk()
            num_chunks += is_chunk_end
            if num_chunks > _MAX_CHUNKS:
                raise TooLarge(
                    f"The body comes in more than {_MAX_CHUNKS} chunks. Send larger ones.", code="too_many_chunks"
                )
            if not data and not is_chunk_end:
                return bytes(body)
        else:
            data = await content.readany()
            if not data:
                return bytes(body)
        body += data
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes)


def _check_media(request: web.BaseRequest) -> None:
    headers = request.headers
    media = headers.get("Content-Type", "")
    if media != JSON and not _is_json(media):
        raise UnsupportedMedia("Content-Type must be application/json, its charset utf-8 or left out.")
    if "Content-Encoding" in headers:
        raise UnsupportedMedia("Content-Encoding is not supported: send the body plain.", code="unsupported_encoding")


def _is_json(media: str) -> bool:
    name, *parameters = media.lower().split(";")
    if name.strip() != JSON:
        return False
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            return False
    return True


def _body_too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The body has more than {max_bytes} bytes. Send several requests.")
