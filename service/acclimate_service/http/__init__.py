"""HTTP: routes, request bodies, problem documents, and the server."""
