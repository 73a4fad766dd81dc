"""One attack: `python -m hostile NAME URL`, until its input ends; prints what was replied as JSON."""

import json
import os
import sys
import threading

from hostile.attackers import run

if __name__ == "__main__":
    os.nice(19)  # what is measured is what the service does for them, not who gets the cores of this machine
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    target = run(sys.argv[1], sys.argv[2], stop)
    print(json.dumps({"replies": target.replies, "wrong": target.wrong}))
