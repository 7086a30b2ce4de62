"""The APIs of the server, a file each: what clients send, the routes, and how an answer is told."""
