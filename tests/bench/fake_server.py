"""What `Server` needs of a server, in one file: fake_server.py PORT WHAT.

WHAT: `good`; `stubborn` has a child, and both ignore SIGTERM; `silent` answers requests without a token; `refuses`
answers them with 500; `drops` closes the connection instead. Each leaves shared memory behind, as vLLM's server does.
"""

import http.server
import mmap
import signal
import subprocess
import sys
from pathlib import Path

port, what = int(sys.argv[1]), sys.argv[2]


class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 else 503)
        self.end_headers()

    def do_POST(self):
        if what == "drops":
            return
        self.send_response(500 if what == "refuses" else 200)
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        if what in ("good", "stubborn"):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')
        else:
            self.wfile.write(b'data: {"error": "no"}\n\n')


if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with Path(f"/dev/shm/bench-fake-{port}").open("w+b") as file:
    file.truncate(mmap.PAGESIZE)
    shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
