"""Loggers by name (--log.to). A run imports only attach.py and the file of each logger that it names."""
