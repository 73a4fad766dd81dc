"""Ends with status 0 when the service of this container answers batches. Standard library only: it runs every 10 s."""

import os
import sys
from http.client import HTTPConnection, HTTPException


def main() -> str | None:
    """Why no batches are answered; None when they are."""
    # Not urllib, which would ask a proxy that the environment names.
    connection = HTTPConnection("127.0.0.1", int(os.environ["ACCLIMATE_PORT"]), timeout=4)
    try:
        connection.request("GET", "/v2/health/ready")
        reply = connection.getresponse()
        return None if reply.status == 200 else f"{reply.status}: {reply.read().decode(errors='replace')}"
    except (OSError, HTTPException) as error:
        return f"no answer: {error}"


if __name__ == "__main__":
    sys.exit(main())
