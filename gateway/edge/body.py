"""Reads a request's body: plain JSON in UTF-8, with limits on size, number of chunks, time and pace.

memory_budget.py bounds all bodies together; it is told a body's size before its bytes are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import HttpVersion11, StreamReader, web

from common.errors import BadRequest, ExpectationFailed, RequestTimeout, TooLarge, UnsupportedMedia
from gateway.error_responses import JSON

_MAX_CHUNKS = 65_536  # of one body: a chunk costs far more than its bytes


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int
    timeout_s: float
    # The slowest pace of a client. A body fails when it is `pace_window_s` behind this pace, or when nothing arrives
    # for that time: bytes that came faster earlier are no credit.
    min_bytes_per_s: float = 8192.0
    pace_window_s: float = 5.0
    max_chunks: int = _MAX_CHUNKS


GrowTo = Callable[[int], None]  # called with the number of bytes that a body has


async def read_body(request: web.BaseRequest, limits: BodyLimits, remaining_s: float, grow_to: GrowTo) -> bytes:
    """Read the whole body of a JSON request within `remaining_s`; `grow_to` is told its size before bytes are kept.

    Raises:
        Overloaded: raised by `grow_to`; the rest is not read.
        UnsupportedMedia: the body is not declared as JSON in UTF-8, or it is compressed.
        TooLarge: it has more than `limits.max_bytes`, or too many chunks; the rest is not read.
        ExpectationFailed: `Expect` asks for something other than 100-continue.
        RequestTimeout: the body arrived too late or too slowly.
        BadRequest: the chunks are malformed.
    """
    _check_media(request)
    declared = request.content_length
    if declared is not None and declared > limits.max_bytes:
        raise _body_too_large(limits.max_bytes)
    grow_to(declared or 0)
    expectation = request.headers.get("Expect")
    if expectation is not None:
        if expectation.lower() != "100-continue":
            raise ExpectationFailed("Expect may only be 100-continue.")
        if request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
    content = request.content
    chunked = "Transfer-Encoding" in request.headers
    try:
        if content.is_eof() and not chunked:
            return content.read_nowait()
        return await _read_stream(content, limits, min(limits.timeout_s, remaining_s), grow_to, chunked=chunked)
    except web.RequestPayloadError:
        raise BadRequest("The body's chunks are malformed.") from None


async def _read_stream(
    content: StreamReader, limits: BodyLimits, timeout_s: float, grow_to: GrowTo, *, chunked: bool
) -> bytes:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    end_s = begin_s + timeout_s
    late_s = begin_s + limits.pace_window_s  # when the client is too slow, if nothing more arrives
    body = bytearray()
    num_paced = num_chunks = 0
    try:
        async with asyncio.timeout_at(end_s) as timeout:
            while True:
                if len(body) == content.total_bytes:  # the next read waits, unless the body has ended
                    sent_s = (len(body) - num_paced) / limits.min_bytes_per_s
                    late_s = min(late_s + sent_s, loop.time() + limits.pace_window_s)
                    num_paced = len(body)
                    timeout.reschedule(min(late_s, end_s))
                is_chunk_end = False
                if chunked:
                    data, is_chunk_end = await content.readchunk()
                    num_chunks += is_chunk_end
                    if num_chunks > limits.max_chunks:
                        raise TooLarge(
                            f"The body comes in more than {limits.max_chunks} chunks. Send larger ones.",
                            code="too_many_chunks",
                        )
                else:
                    data = await content.readany()
                if not data and not is_chunk_end:
                    return bytes(body)
                body += data
                if len(body) > limits.max_bytes:
                    raise _body_too_large(limits.max_bytes)
                grow_to(len(body))
    except TimeoutError:
        if late_s < end_s:
            rate = f"{limits.min_bytes_per_s:g}"
            raise RequestTimeout(f"The body came at less than {rate} bytes a second. Send it again.") from None
        raise RequestTimeout(f"The body did not arrive within {timeout_s:g} s. Send it again.") from None


def _check_media(request: web.BaseRequest) -> None:
    headers = request.headers
    media = headers.get("Content-Type", "")
    if media != JSON and not _is_json(media):
        raise UnsupportedMedia("Content-Type must be application/json, its charset utf-8 or left out.")
    if "Content-Encoding" in headers:
        raise UnsupportedMedia(
            "Content-Encoding is not supported: send the body uncompressed.", code="unsupported_encoding"
        )


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
