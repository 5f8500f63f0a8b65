"""Loggers for other libraries, each in a module of its own that needs its library."""
