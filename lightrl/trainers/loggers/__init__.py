"""Loggers by name (--log.to). A run enters attach.py and the file of each logger that it names, and no other."""
