"""The `octavo` command: serve a model, measure a server, look after models on disk."""
