"""uvicorn's HTTP/1.1 connection, with what it leaves out: a bound on heads, errors in our shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cache_router.errors import HeadTooLargeError, InvalidRequestError, RequestError
from gateway.asgi import new_request_id
from gateway.error_responses import error_response

_MAX_HEAD_BYTES = 64 * 1024


class ClientConnection(HttpToolsProtocol):
    """A client's connection; what is no request is refused here, before there is a scope."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn gives."""
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Feed the parser; give up on a head that does not end."""
        was_in_head = self._in_head
        super().data_received(data)
        # The read in which a head begins may hold much of what came before: it is not counted.
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._in_head = False
                self._refuse(HeadTooLargeError(_MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(InvalidRequestError(msg))

    def _refuse(self, error: RequestError) -> None:
        # In the middle of an answer, another one would be taken for a part of it.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            response = error_response(error)
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"x-request-id: %s\r\nconnection: close\r\n\r\n%s"
                % (
                    response.status,
                    HTTPStatus(response.status).phrase.encode(),
                    len(response.body),
                    new_request_id().encode(),
                    response.body,
                )
            )
        self.transport.close()
