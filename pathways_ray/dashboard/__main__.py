"""`python -m pathways_ray.dashboard`: the page of one cluster, for `pw.init(dashboard=True)`.

Its settings come as one line of JSON on standard input, since arguments and environments of processes can be read by
others; it prints its address and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from pathways_ray.dashboard.server import serve


def main() -> None:
    settings = json.loads(sys.stdin.readline())

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    serve(**settings, started=lambda url: print(url, flush=True))


main()
