"""Copies of a model on a Ray cluster: a server with replicas, and a file of requests that many answer."""
