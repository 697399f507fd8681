"""Stands in for an engine: processes that hold on to life, and a server that says it is well.

    stand_in.py clingy FIFO         leave processes behind that ignore SIGTERM and left the session
    stand_in.py serve FIFO PORT     answer GET /health with 200
    stand_in.py fail FIFO           write a line to stderr and end with status 3
    stand_in.py obey FIFO           end with status 0 at SIGTERM

Each writes its process ids into the FIFO first, and all its processes keep the FIFO open: whoever
reads it gets the end of the file when the last one is gone.
"""

from __future__ import annotations

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


def fork_clinging_child(*, own_session: bool) -> int:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if own_session:
            os.setsid()
        os.write(writer, b"x")
        while True:
            signal.pause()
    os.read(reader, 1)  # it ignores SIGTERM from here on
    return pid


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    mode, fifo, *rest = sys.argv[1:]
    with open(fifo, "w") as told:
        pids = [os.getpid()]
        if mode == "clingy":
            pids += [fork_clinging_child(own_session=False), fork_clinging_child(own_session=True)]
        told.write(" ".join(map(str, pids)) + "\n")
        told.flush()
        if mode == "fail":
            sys.stderr.write("the stand-in cannot go on\n")
            sys.exit(3)
        if mode == "obey":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            told.write("listening\n")
            told.flush()
        if mode == "serve":
            HTTPServer(("127.0.0.1", int(rest[0])), Health).serve_forever()
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
