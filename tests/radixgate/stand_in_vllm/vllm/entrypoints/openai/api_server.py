"""Stands in for vLLM's server: takes its flags, starts in no time, and answers what is asked.

`STAND_IN_FIFO` names a FIFO that it keeps open; `STAND_IN_MODE=fail` makes it end with an error,
`STAND_IN_MODE=load` makes it load for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--port", type=int, required=True)
options, others = parser.parse_known_args()

MODELS = {
    "object": "list",
    "data": [{"id": options.served_model_name, "object": "model", "max_model_len": 64}],
}
COMPLETION = {
    "id": "x",
    "object": "chat.completion",
    "model": options.served_model_name,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "stand-in"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answers: dict[str, Any] = {"/health": {}, "/v1/models": MODELS}
        self.answer(answers.get(self.path))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(COMPLETION if self.path == "/v1/chat/completions" else None)

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with open(os.environ["STAND_IN_FIFO"], "w") as told:
        told.write(" ".join(others) + "\n")
        told.flush()
        mode = os.environ.get("STAND_IN_MODE")
        if mode == "fail":
            sys.exit("ValueError: the stand-in cannot go on")
        while mode == "load":
            signal.pause()
        ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
