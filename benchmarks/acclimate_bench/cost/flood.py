"""A client that keeps many batches under way: `python -m ... URL CLIENT NUMBER < BATCH.npy`.

It runs in a process of its own, so as not to slow down whoever measures, and imports little, so as to begin soon.
"""

import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acclimate_client import Client


def flood(url: str, client: str, number: int) -> None:
    """Send the batch without end, so many times at once; a line is printed once all callers have had an answer."""
    images = np.load(io.BytesIO(sys.stdin.buffer.read()))
    begun = threading.Barrier(number, lambda: print("flooding", flush=True))

    def send(_: int) -> None:
        with Client(url) as caller:
            caller.predict(client, images, layout="NCHW")
            begun.wait()
            while True:
                caller.predict(client, images, layout="NCHW")

    with ThreadPoolExecutor(number) as callers:
        list(callers.map(send, range(number)))


if __name__ == "__main__":
    flood(sys.argv[1], sys.argv[2], int(sys.argv[3]))
