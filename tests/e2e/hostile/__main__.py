"""One attack: `python -m hostile NAME URL`, until its input ends; prints what was replied as JSON.

Attackers have machines of their own, and what is measured is what the service does for them, not who gets the cores of
this one. So they take what it and its client leave, and no more: on Linux they are idle tasks, which give a core up at
once, where the nicest of others keep it for a slice of some milliseconds.
"""

import json
import os
import sys
import threading

from hostile.attackers import run

if __name__ == "__main__":
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    target = run(sys.argv[1], sys.argv[2], stop)
    print(json.dumps({"replies": target.replies, "wrong": target.wrong}))
